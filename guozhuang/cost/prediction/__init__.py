"""From what was measured of one process (``profile``) to the step of many ranks on any cluster (``predict``)."""

from .predict import Prediction, machine_of, predict
from .profile import Profile

__all__ = ["Prediction", "Profile", "machine_of", "predict"]
