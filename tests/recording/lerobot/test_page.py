"""The programs of docs/lerobot.md: actions without this package, and episodes from a program."""

import itertools
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from sam3_node import client, wire
from sam3_node.transport.tap import StreamTap
from tests.support.pages import Code, code_blocks
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.threads import repeating
