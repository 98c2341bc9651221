"""``python -m snapmla_cli``, as ``snapmla``."""

from snapmla_cli import app

if __name__ == "__main__":
    app(prog_name="snapmla")
