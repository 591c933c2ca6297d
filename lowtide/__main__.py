"""`python -m lowtide` is the `lowtide` command."""

from lowtide.leakcheck.cli.commands import main

if __name__ == "__main__":
    main()
