"""``thinwire check``: what is asked of every codec and scheme, tried on one."""

from __future__ import annotations

from thinwire.contract.requirement import Requirement, Result
from thinwire.contract.suite import Report, examine, requirements_of

__all__ = ["Report", "Requirement", "Result", "examine", "requirements_of"]
