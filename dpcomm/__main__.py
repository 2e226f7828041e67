"`python -m dpcomm` is the command `dpcomm`."

from dpcomm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
