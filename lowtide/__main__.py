"""`python -m lowtide` is the `lowtide` command."""

from lowtide.leakcheck.cli import main

if __name__ == "__main__":
    main()
