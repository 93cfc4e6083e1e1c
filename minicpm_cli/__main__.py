"""`python -m minicpm_cli` is `minicpm`."""

from minicpm_cli.cli import main

if __name__ == "__main__":
    main()
