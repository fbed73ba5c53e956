"""How large a run log may become."""

import pytest

from surefoot import LogLimits
from surefoot.errors import SettingError
from surefoot.record.limits import SMALLEST
from surefoot.record.schema import TABLES


def test_every_table_has_a_limit():
    limits = LogLimits(scalars_bytes=SMALLEST)
    assert limits.of("scalars") == SMALLEST
    assert all(limits.of(table) >= SMALLEST for table in TABLES)


@pytest.mark.parametrize("value", [SMALLEST - 1, 1e9, None])
def test_a_limit_that_cannot_hold_a_few_segments_is_refused(value):
    with pytest.raises(SettingError, match="`layers_bytes` must be at least 65,536 bytes"):
        LogLimits(layers_bytes=value)
