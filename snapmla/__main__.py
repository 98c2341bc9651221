"""``python -m snapmla``: the commands of the ``snapmla_cli`` package.

The command ``snapmla`` starts that package without this one, so that ``--help`` waits for no torch.
"""

from dsl_kernels import registry

if __name__ == "__main__":
    registry.named("snapmla_cli:app")(prog_name="snapmla")
