"""The packages that have TensorRT, without importing them."""

from ...errors import MissingExtraError, install_advice, require_installed

PACKAGES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt-rtx"}
"""Extra of each module, the preferred one first."""


def check_packages() -> None:
    """Raise MissingExtraError if none of the packages is installed."""
    for name, extra in PACKAGES.items():
        try:
            return require_installed(name, extra)
        except MissingExtraError:
            continue
    raise make_missing()


def make_missing() -> MissingExtraError:
    """Return the error that says that none of the packages is there, and which one to install."""
    return MissingExtraError(
        "expected tensorrt or tensorrt_rtx for engines, found neither; for data-centre GPUs and Jetson: "
        f"{install_advice(PACKAGES['tensorrt'])}; for RTX GPUs: {install_advice(PACKAGES['tensorrt_rtx'])}"
    )
