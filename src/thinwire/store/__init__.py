"""Where the references of seen samples live."""

from thinwire.store.background import Background
from thinwire.store.held import Held
from thinwire.store.plan import Members, StepVisits, Visit, plan_step
from thinwire.store.references import ReferenceStore
from thinwire.store.slots import SlotFiles
from thinwire.store.tier import Tier

__all__ = [
    "Background",
    "Held",
    "Members",
    "ReferenceStore",
    "SlotFiles",
    "StepVisits",
    "Tier",
    "Visit",
    "plan_step",
]
