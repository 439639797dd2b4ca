"""Render labelled clips of a table, objects and a robot arm into a clip folder (tools/scenes/clips.py).

    python -m tools.scenes --split train --clips 500 --frames 16 --size 320x240 --fps 12 -o out/scenes/train
    python -m tools.scenes --recording -o out/scenes/recording

Needs the extra `scenes` and, without a GPU, the system library OSMesa (apt-get install libosmesa6). A clip
depends only on its settings, seed and index. A run that is started again keeps finished clips. No object or surface
of one split appears in another: see tools/scenes/objects.py.
"""

import argparse
import sys
from pathlib import Path

from tools.command import errors_in_one_line
from tools.scenes import showcase
from tools.scenes.camera import STYLES, WALK
from tools.scenes.clips import write_clip
from tools.scenes.generate import RenderJob, open_renderer, render
from tools.scenes.objects import SPLITS
from tools.scenes.plan import ClipSettings
from tools.scenes.render import load_mujoco
from tools.scenes.scenarios import SCENARIOS

WEIGHTS = "free=5,occlusion=2,leave=1.5,lookalike=1.5"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parse(arguments)
    with errors_in_one_line():
        load_mujoco()
        if options.recording:
            return render_recording(options.output)
        job = RenderJob(make_settings(options), options.seed, options.output)
        return render(job, options.clips, options.workers)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tools.scenes", description=summary)
    parser.add_argument("--split", choices=SPLITS, default="train", help="split of objects and surfaces")
    parser.add_argument("--clips", type=positive, default=100, help="number of clips")
    parser.add_argument("--frames", type=positive, default=16, help="frames of each clip")
    parser.add_argument("--size", type=size, default=(320, 240), metavar="WxH", help="size of the frames")
    parser.add_argument("--fps", type=float, default=12.0, help="frames per second")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--workers", type=positive, default=1, help="processes that render")
    scenarios = f"weights of the scenarios, such as {WEIGHTS}"
    parser.add_argument("--scenario", type=weights, default=weights(WEIGHTS), help=scenarios)
    parser.add_argument("--depth", action="store_true", help="also write depth")
    parser.add_argument("--nameless", action="store_true", help="also solids of tools/scenes/nameless.py")
    parser.add_argument("--camera", choices=(*STYLES, WALK), default="", help="style of all cameras")
    parser.add_argument("--recording", action="store_true", help="only the demo's clip, with depth")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the clips")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, found {text!r}")
    return int(text)


def size(text: str) -> tuple[int, int]:
    """Read '320x240' as (width, height)."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"expected WIDTHxHEIGHT in pixels, found {text!r}")
    return int(width), int(height)


def weights(text: str) -> dict[str, float]:
    """Read 'free=2,leave' as weights of scenarios; a missing weight is 1."""
    pairs = [item.partition("=") for item in text.split(",")]
    try:
        scenario_weights = {name: float(weight or 1) for name, _, weight in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected weights such as {WEIGHTS}, found {text!r}") from error
    values = scenario_weights.values()
    if not set(scenario_weights) <= set(SCENARIOS) or min(values) < 0 or not sum(values):
        raise argparse.ArgumentTypeError(f"expected weights of {', '.join(SCENARIOS)}, found {text!r}")
    return scenario_weights


def make_settings(options: argparse.Namespace) -> ClipSettings:
    scenario = options.scenario
    (width, height) = options.size
    return ClipSettings(
        options.split,
        options.frames,
        width,
        height,
        options.fps,
        scenario,
        options.depth,
        options.nameless,
        options.camera,
    )


def render_recording(root: Path) -> int:
    """Render the showcase."""
    settings = showcase.SETTINGS
    rendered = showcase.record(open_renderer(settings.width, settings.height))
    write_clip(root, showcase.NAME, rendered.clip, rendered.jpeg)
    print(f"{showcase.NAME}: {len(rendered.clip)} frames in {root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
