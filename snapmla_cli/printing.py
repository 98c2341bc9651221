"""The console of all commands: text is printed as it is, and lines are not broken."""

from rich.console import Console

console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
