"""Where the references of seen samples live."""

from thinwire.store.held import Held
from thinwire.store.plan import Members, StepVisits, Visit, plan_step
from thinwire.store.references import ReferenceStore

__all__ = ["Held", "Members", "ReferenceStore", "StepVisits", "Visit", "plan_step"]
