"""Follow objects in windows around them, too."""

from ...models import TrackerModel
from ...schema.state import SavedState
from ...tracking import Tracker
from ...tracking.windows import Windows, WindowsState, suits
from ..stage import Stage
from ..step import StepFrame


class WindowState(SavedState):
    """What `FollowWindows` keeps."""

    windows: WindowsState


class FollowWindows(Stage):
    """Improves the tracks by windows, where the model's input is smaller than the frame.

    Windows cost time, so none is followed while the node sheds work; nor where the robot covers objects, of which
    windows know nothing. Windows begin again after that.
    """

    name = "window"
    timed = "device"
    counts_as = "track"
    STATE = WindowState

    def __init__(self, model: TrackerModel, tracker: Tracker, windows: Windows) -> None:
        self._model = model
        self._tracker = tracker
        self._windows = windows

    def run(self, step: StepFrame) -> None:
        """Replace `tracks`, and fill `window_masks`."""
        if step.shed_level or step.cover is not None or not suits(self._model, step.image):
            self._windows.forget_all()
            return

        def was_prompted(object_id: int) -> bool:
            return self._tracker.was_prompted(object_id, step.frame_number)

        step.tracks, step.window_masks = self._windows.step(
            step.image, step.frame_number, step.tracks, was_prompted
        )
