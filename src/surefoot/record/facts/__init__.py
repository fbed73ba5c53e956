"""The facts of a run: typed, frozen, and the only connection from recording to diagnosis.

`RunFacts` is the content of `facts.json`. Its parts are in `run_facts`, `models`, `optimizers`, `data` and
`experiments`; facts of sampled steps are in `sampled_steps` and `calls`, single events in `events`; `codec` reads and
writes all of them.
"""

from surefoot.record.facts.calls import *
from surefoot.record.facts.codec import Facts as Facts
from surefoot.record.facts.codec import FactsError as FactsError
from surefoot.record.facts.data import *
from surefoot.record.facts.description import *
from surefoot.record.facts.events import *
from surefoot.record.facts.experiments import *
from surefoot.record.facts.from_steps import *
from surefoot.record.facts.models import *
from surefoot.record.facts.optimizers import *
from surefoot.record.facts.preflight import *
from surefoot.record.facts.ranks import *
from surefoot.record.facts.run_facts import *
from surefoot.record.facts.sampled_steps import *
