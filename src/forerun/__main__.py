"""`python -m forerun`, for those without the command on their path."""

from forerun.cli.main import main

if __name__ == "__main__":
    main()
