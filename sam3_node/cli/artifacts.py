"""Commands that make files: keys, vocabularies of phrase vectors, converted weights, and datasets of recordings."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import AuthenticationError, BagError, OutputError, SettingsError, VocabularyError, require
from ..files import explain_os_error, prepare_output, write_output
from ..processes.signals import print_notice
from ..settings import Settings
from ..types import KEY_ROLES
from .early_checks import check_node
from .parser import Commands
from .progress import printable

if TYPE_CHECKING:
    from ..detection.phrases import PhraseEncoder
    from ..detection.vocabulary import Vocabulary
    from ..transport.security import KeyFolder

MAX_DIGITS = 9
"""Digits of the number of an episode."""
MAX_SECONDS = 1e6
"""Seconds of an episode."""
DEFAULT_FOLDER = Path("~/.config/sam3_node/keys")
"""Folder of keys, unless transport.keys names another."""
PUBLIC_TEXT_ENCODER = "openai/clip-vit-base-patch32"
"""Model that made the text vectors in public checkpoints of YOLO-World."""


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    _add_keys(commands)
    _add_vocabulary(commands)
    weights = commands.add_group("weights", "convert checkpoints of models")
    checkpoint = weights.add("convert", weights_convert)
    checkpoint.add_path("file FILE.pt", "checkpoint such as yolov8s-worldv2.pt")
    checkpoint.add_path("-o, --out FOLDER", "folder for config.json and the weights", required=True)
    dataset = commands.add("convert", convert)
    dataset.add_path("recordings RECORDING", "file NAME.mcap, or a folder of them", nargs="+")
    dataset.add_setting("--lerobot FOLDER", "lerobot.folder", "LeRobot dataset to write, or to append to")
    text = "version of a new dataset: 3.0, or 2.1 for GR00T [3.0]"
    dataset.add_setting("--lerobot-version V", "lerobot.version", text)
    dataset.add_setting("--fps N", "lerobot.fps", "rows per second [those of the slowest camera]")
    dataset.add_setting("--task TEXT", "lerobot.task", "task of episodes without one [the names looked for]")
    edited = commands.add("episodes", episodes)
    edited.add_path("dataset FOLDER", "LeRobot dataset that sam3-node has written")
    edited.add_repeated("--drop N", "leave episode N out", int)
    edited.add_repeated(
        "--trim N=BEGIN:END", "keep these seconds of episode N; either may be empty", _parse_trim
    )
    edited.add_repeated("--split N=T", "let another episode begin after T seconds of episode N", _parse_split)
    edited.add_repeated("--relabel N=TASK", "give episode N another task", _parse_task)
    edited.add_path("--write NEW", "write the dataset with these changes to a new folder; the old one stays")
    edited.add_path("--pictures FILE.jpg", "draw a strip of pictures of each episode, up to 400")


def _add_keys(commands: Commands) -> None:
    group = commands.add_group(
        "keys", "make, list and revoke the keys of nodes, cameras, robots, readers and operators"
    )
    new = group.add("new", keys_new)
    new.add("name NAME", "name of the key, such as cam0 or policy")
    new.add("--role", "what its owner may do; default: NAME, if it is one of the roles", choices=KEY_ROLES)
    text = "with --role camera: camera.name that it may send, * for all; may be repeated [NAME]"
    new.add("--camera CAMERA", text, default=[], action="append")
    group.add("list", keys_list)
    revoke = group.add("revoke", keys_revoke)
    revoke.add("name NAME", "name of the key")


def keys_new(args: Namespace, settings: Settings) -> None:
    """Make a key pair and authorise it.

    Raises AuthenticationError for a name that is taken, and OutputError if a file cannot be written.
    """
    # the usual keys are named after their role
    role = args.role or args.name
    if role not in KEY_ROLES:
        raise AuthenticationError(f"expected --role, one of {', '.join(KEY_ROLES)}, found none")
    if args.camera and role != "camera":
        raise AuthenticationError(f"expected --camera with --role camera only, found role {role}")
    folder = _open_keys(settings)
    with explain_os_error(OutputError, f"cannot change the keys in {folder.path}"):
        key = folder.create(args.name, role, args.camera)
    # three things to do next: where the secret goes, where the public part goes, and which setting uses them
    print(f"key {key}: its owner needs {folder.path / key.name}.secret; keep it from all others")
    print(f"other machines need {folder.path / 'authorised' / key.name}.pub, in their folder `authorised`")
    if settings.transport.keys is None:
        print(f'use the keys with: [transport] keys = "{folder.path}"')


def keys_list(args: Namespace, settings: Settings) -> None:
    """List the keys: name, role, cameras, and whether the secret is here."""
    folder = _open_keys(settings)
    own = folder.own_names()
    authorised = folder.authorised()
    revoked = folder.revoked()
    # the revoked keys, too: a refused owner asks which of them it has
    print(f"{'name':20} {'role':9} {'cameras':20} {'public key':41} state")
    for keys, state in ((authorised, "authorised"), (revoked, "revoked")):
        for key in sorted(keys.values(), key=lambda key: key.name):
            if key.name in own and state == "authorised":
                note = ", secret here"
            else:
                note = ""
            cameras = ",".join(key.cameras)
            print(printable(f"{key.name:20} {key.role:9} {cameras:20} {key.public:41} {state}{note}"))


def keys_revoke(args: Namespace, settings: Settings) -> None:
    """Withdraw a key; running processes cut off its owner.

    Raises AuthenticationError for a key that is not authorised, and OutputError if a file cannot be moved.
    """
    folder = _open_keys(settings)
    with explain_os_error(OutputError, f"cannot change the keys in {folder.path}"):
        key = folder.revoke(args.name)
    print(f"key {key.name} is revoked on this machine; remove authorised/{key.name}.pub on the others, too")


def convert(args: Namespace, settings: Settings) -> int:
    """Append the episodes of own recordings to a LeRobot dataset.

    Return 1 if an episode or a recording was left out. Raises SettingsError without a folder, and as
    `convert_recordings` does.
    """
    from ..recording.lerobot.conversion import convert_recordings, group_files
    from ..recording.lerobot.gripper import GripperFinder
    from ..recording.lerobot.records import count_rows

    folder = settings.lerobot.folder
    if folder is None:
        raise SettingsError("convert: expected --lerobot FOLDER, the dataset to write, found none")
    gripper = None
    if settings.robot.urdf is not None:
        gripper = GripperFinder(settings.robot.urdf, settings.robot.base, settings.spatial.calibration)
    left_out = 0
    groups = group_files(args.recordings)
    for files in groups:
        try:
            found = convert_recordings(
                files, settings.lerobot, folder, lambda line: print(printable(line)), gripper
            )
        except BagError as error:
            # one that cannot be read does not hold the others
            if len(groups) == 1:
                raise
            left_out += 1
            print(printable(f"{files[0]}: not converted: {error}"), flush=True)
            continue
        left_out += found.left_out
        text = f"{files[0]}: {found.appended} episodes to {folder}"
        if found.present:
            text += f", {found.present} were there already"
        if found.left_out:
            text += f", {found.left_out} left out"
        print(printable(text), flush=True)
    if rows := count_rows(folder):
        print(printable(f"{folder}: {rows}"), flush=True)
    return 1 if left_out else 0


def episodes(args: Namespace, settings: Settings) -> None:
    """List the episodes of a LeRobot dataset, or write a copy in which some are dropped, cut or renamed.

    Raises OutputError as `write_copy` does.
    """
    from ..recording.lerobot import editing, listing
    from ..recording.lerobot.records import count_rows

    splits: dict[int, list[float]] = {}
    for number, time_s in args.split:
        splits.setdefault(number, []).append(time_s)
    edits = editing.Edits(frozenset(args.drop), dict(args.trim), splits, dict(args.relabel))
    for line in listing.list_episodes(args.dataset):
        print(printable(line))
    print(printable(f"{args.dataset}: {count_rows(args.dataset)}"))
    if args.pictures is not None:
        cv2 = require("cv2", "cli")
        prepare_output(args.pictures)
        write_output(args.pictures, cv2.imencode(".jpg", listing.draw_sheet(args.dataset))[1].tobytes())
        print(printable(f"pictures: {args.pictures}"))
    if not edits.episodes:
        return
    if args.write is None:
        raise SettingsError("episodes: expected --write NEW, the folder for the changed dataset, found none")
    for line in editing.write_copy(args.dataset, edits, args.write):
        print(printable(line))
    print(printable(f"{args.write}: {count_rows(args.write)}"))


def _parse_episode(text: str, expected: str) -> tuple[int, str]:
    """Return the number of an episode and what stands behind it. Raises ValueError for another text."""
    number, equals, value = text.partition("=")
    if not equals or not number.isdecimal() or len(number) > MAX_DIGITS:
        raise ValueError(f"expected {expected}, found {text!r:.80}")
    return int(number), value


def _parse_seconds(text: str, expected: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < MAX_SECONDS:
        raise ValueError(f"expected {expected}, found {text!r:.80}")
    return seconds


def _parse_trim(text: str) -> tuple[int, tuple[float, float | None]]:
    expected = "N=BEGIN:END, such as 3=0.5:7.2"
    number, value = _parse_episode(text, expected)
    begin, colon, end = value.partition(":")
    if not colon:
        raise ValueError(f"expected {expected}, found {text!r:.80}")
    end_s = _parse_seconds(end, expected) if end else None
    return number, (_parse_seconds(begin or "0", expected), end_s)


def _parse_split(text: str) -> tuple[int, float]:
    expected = "N=T, such as 3=4.5"
    number, value = _parse_episode(text, expected)
    return number, _parse_seconds(value, expected)


def _parse_task(text: str) -> tuple[int, str]:
    number, value = _parse_episode(text, "N=TASK, such as '3=put the mug on the tray'")
    if not value or not value.isprintable():
        raise ValueError(f"expected a task of printable text, found {value!r:.80}")
    return number, value


def _open_keys(settings: Settings) -> KeyFolder:
    from ..transport.security import KeyFolder

    return KeyFolder((settings.transport.keys or DEFAULT_FOLDER).expanduser().absolute())


def _add_vocabulary(commands: Commands) -> None:
    group = commands.add_group(
        "vocabulary", "build and list files of phrase vectors, for nodes without a text encoder"
    )
    build = group.add("build", vocabulary_build)
    build.add("phrases PHRASE", 'phrase such as "red mug"; default: all phrases of --from', nargs="*")
    build.add_path(
        "-o, --out FILE",
        "vocabulary file to write; an existing file is replaced after the new one is complete",
        required=True,
    )
    build.add_path("--phrases FILE.txt", "text file with more phrases, one on each line", dest="phrase_file")
    build.add_repeated(
        "--from FILE",
        "take vectors from this vocabulary or .json map {phrase: [numbers]}",
        Path,
        dest="sources",
    )
    build.add_path(
        "--encoder FOLDER", "CLIP text encoder, in the layout of transformers, for phrases without a vector"
    )
    build.add(
        "--model NAME",
        "model that made the vectors, such as openai/clip-vit-base-patch32; required for .json; "
        "default: the name of the --encoder folder",
    )
    listed = group.add("list", vocabulary_list)
    text = "vocabulary file to read [detector.vocabulary, or the one beside the weights detector.name]"
    listed.add_path("file FILE", text, nargs="?")


def vocabulary_build(args: Namespace, settings: Settings) -> None:
    """Write a vocabulary file."""
    require("safetensors", "node")
    from ..detection.vocabulary import build_vocabulary, read_phrases, read_source

    # an output that cannot be written is refused before vectors are computed, which takes long
    prepare_output(args.out)
    phrases = list(args.phrases)
    if args.phrase_file:
        phrases += read_phrases(args.phrase_file)
    sources = [read_source(path, args.model) for path in args.sources]
    vocabulary = build_vocabulary(phrases, sources, _load_encoder(args.encoder, args.model))
    vocabulary.save(args.out)
    print(_describe_vocabulary(args.out, vocabulary))


def vocabulary_list(args: Namespace, settings: Settings) -> None:
    """List the phrases of a vocabulary, by default the detector's."""
    require("safetensors", "node")
    from ..detection.detectors import NANO, VOCABULARY
    from ..detection.vocabulary import Vocabulary

    # the file that the detector would read: named by a setting, or beside its weights
    detector = settings.detector
    folder = Path(detector.name)
    if detector.name == "nano":
        folder = NANO
    path = args.file or detector.vocabulary or folder / VOCABULARY
    vocabulary = Vocabulary.load(path)
    print(_describe_vocabulary(path, vocabulary))
    print(*vocabulary.phrases, sep="\n")


def weights_convert(args: Namespace, settings: Settings) -> None:
    """Convert a YOLO-World checkpoint to a folder of safetensors."""
    check_node()
    from ..detection.detectors import VOCABULARY
    from ..models.yolo.convert import convert_checkpoint

    model = convert_checkpoint(args.file, args.out)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{args.out}: YOLO-World, {millions:.1f} M parameters, phrase vectors of {model.config.text_channels}"
    )
    # a public checkpoint brings vectors for its own classes: a vocabulary to begin with
    vocabulary = _read_vocabulary(args.file)
    if vocabulary is not None:
        vocabulary.save(args.out / VOCABULARY)
        print(_describe_vocabulary(args.out / VOCABULARY, vocabulary))


def _load_encoder(folder: Path | None, model: str | None) -> PhraseEncoder | None:
    """Load the text encoder of a folder. Return None without a folder."""
    if folder is None:
        return None
    check_node()
    from ..detection.clip_text import ClipText

    return ClipText(folder, model=model)


def _read_vocabulary(checkpoint: Path) -> Vocabulary | None:
    """Return the classes in a YOLO-World checkpoint as a vocabulary. Warn and return None if it has none."""
    from ..detection.vocabulary import Vocabulary
    from ..models.yolo.convert import read_phrase_vectors

    # the checkpoint is converted all the same: a vocabulary may come from elsewhere
    named_vectors = read_phrase_vectors(checkpoint)
    try:
        if named_vectors is None:
            raise VocabularyError("it has no text vectors with names")
        phrases, vectors = named_vectors
        return Vocabulary(phrases, vectors.numpy(), PUBLIC_TEXT_ENCODER)
    except VocabularyError as error:
        print_notice(
            f"sam3-node: warning: {checkpoint}: no vocabulary was written: {error}; build one with "
            "sam3-node vocabulary build, or set detector.text_encoder"
        )
        return None


def _describe_vocabulary(path: Path, vocabulary: Vocabulary) -> str:
    return f"{path}: {len(vocabulary)} phrases, model {vocabulary.model}, dimension {vocabulary.dimension}"
