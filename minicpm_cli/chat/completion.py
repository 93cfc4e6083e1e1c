"""Tab: commands, and behind one what it takes: settings and their values, session names, the paths of files."""

from __future__ import annotations

from collections.abc import Iterator

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from minicpm_cli.chat.chat import Chat
from minicpm_cli.chat.commands import COMMANDS, Command, find
from minicpm_cli.errors import MinicpmError


class CommandCompleter(Completer):
    """Looks at what there is now: a session saved a moment ago is found."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        name, behind, argument = text.partition(" ")
        command = find(name)
        if not behind:
            for each in COMMANDS:
                if each.name.startswith(name):
                    more = " " if " " in each.usage else ""  # an argument may follow
                    yield Completion(each.name + more, -len(name), display=each.usage, display_meta=each.help)
        elif command is not None:
            yield from self._words(command, argument.lstrip())
            if command.paths:
                yield from self._files(argument.lstrip(), complete_event)

    def _words(self, command: Command, argument: str) -> Iterator[Completion]:
        word = argument.split(" ")[-1]
        try:
            found = [each for each in command.words(self._chat, argument) if each.startswith(word)]
        except (MinicpmError, OSError):  # a folder that cannot be read completes nothing
            return
        yield from (Completion(each, -len(word)) for each in found)

    def _files(self, argument: str, complete_event: CompleteEvent) -> Iterator[Completion]:
        path = argument.removeprefix("code ").removeprefix("-f ")
        yield from self._paths.get_completions(Document(path), complete_event)
