"""Trains a policy: python launch/train.py --config=configs/quickstart.py --workdir=DIR [--config.key=value ...].

The same command again resumes from the newest checkpoint. Ctrl-C ends the run at the next step, with a checkpoint.
"""

import difflib
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

sys.path.insert(0, str(Path(__file__).parents[1]))  # files of configs/ import each other

_CONFIG = config_flags.DEFINE_config_file("config", None, "A file of configs/; quickstart.py:grpo passes an argument.")
flags.mark_flag_as_required("config")
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Takes metrics, checkpoints and events; a path or gs://.", required=True
)


def main(argv: list[str]) -> None:
    """Runs the configuration that the flags name."""
    logging.set_verbosity(logging.WARNING)
    import dynrl
    from dynrl.config import ConfigError
    from dynrl.loop import RunError

    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        dynrl.run(_CONFIG.value, _WORKDIR.value)
    except (ConfigError, RunError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the newest checkpoint, if there is one", file=sys.stderr)
        sys.exit(130)


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags; an override of a key that does not exist is named, with its near matches."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError):
        from dynrl.config import known_keys

        wrong = [a.removeprefix("--config.").split("=")[0] for a in argv if a.startswith("--config.")]
        wrong = [k for k in wrong if k not in known_keys()]
        if not wrong:  # an error of the config file itself
            raise
        near = difflib.get_close_matches(wrong[0], known_keys(), n=3)
        hint = f"; did you mean {', '.join('config.' + n for n in near)}?" if near else ""
        sys.exit(f"ConfigError: config.{wrong[0]}: there is no such key{hint}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
