"""One file per experiment, each with `get_config(arg)`. Algorithm files change the configuration of another file."""

import importlib
from typing import Any


def base(arg: str) -> Any:
    """The ConfigDict that an algorithm is applied to.

    Args:
      arg: name of a file of this folder, with its argument behind a colon; empty is `quickstart`.

    Raises:
      ValueError: when there is no such file.
    """
    name, _, argument = (arg or "quickstart").partition(":")
    try:
        module = importlib.import_module(f"configs.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(f"configs/{name}.py: there is no such configuration ({error})") from error
    return module.get_config(argument)
