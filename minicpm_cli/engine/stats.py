"""What the engine has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from minicpm_cli.types import Timings, Usage


@dataclass(slots=True)
class Stats:
    """Counts since the engine was made. Seconds are sums; `pages_*` are of the moment."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    steps: int = 0
    host_seconds: float = 0.0  # planning, launching and committing steps; on a CPU their computation, too
    decode_steps: int = 0  # of the steps, those that compute no prompt
    decode_host_seconds: float = 0.0
    wait_seconds: float = 0.0  # waiting for the device to reach the tokens
    computed_tokens: int = 0  # prompt tokens and generated ones that went through the model
    prompt_tokens: int = 0  # of requests that were admitted
    cached_tokens: int = 0  # of those, found in the prefix cache
    generated_tokens: int = 0
    preemptions: int = 0
    drafts: int = 0  # steps of a sequence in which expected tokens were verified
    proposed_tokens: int = 0
    accepted_tokens: int = 0  # of those, the ones that came
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    decode_tokens: int = 0  # after a request's first one
    decode_seconds: float = 0.0
    pages_total: int = 0
    pages_held: int = 0
    pages_idle: int = 0
    peak_pages_held: int = 0

    @property
    def cache_hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_first_token_seconds(self) -> float:
        return self.first_token_seconds / self.first_tokens if self.first_tokens else 0.0

    @property
    def mean_seconds_per_token(self) -> float:
        """From one token of a request to its next one."""
        return self.decode_seconds / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def mean_accepted_tokens(self) -> float:
        """Of a draft; the token drawn after them comes on top."""
        return self.accepted_tokens / self.drafts if self.drafts else 0.0

    def note_step(self, tokens: int, seconds: float, *, decodes: bool = False) -> None:
        self.steps += 1
        if decodes:
            self.decode_steps += 1
            self.decode_host_seconds += seconds
        self.computed_tokens += tokens
        self.host_seconds += seconds

    def note_pages(self, total: int, held: int, idle: int) -> None:
        self.pages_total, self.pages_held, self.pages_idle = total, held, idle
        self.peak_pages_held = max(self.peak_pages_held, held)

    def note_end(self, usage: Usage, timings: Timings) -> None:
        """A request has ended, well or not."""
        if usage.completion_tokens:
            self.first_tokens += 1
            self.first_token_seconds += timings.first_token_seconds
            self.decode_tokens += usage.completion_tokens - 1
            self.decode_seconds += timings.total_seconds - timings.first_token_seconds
