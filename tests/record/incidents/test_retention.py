"""Where incidents go, and how many there may be."""

import pytest

from surefoot import IncidentKeeper
from surefoot.errors import SettingError


def test_an_incident_is_a_folder_named_after_its_step_part_and_rank(tmp_path):
    assert IncidentKeeper(tmp_path).place(123) == tmp_path / "incidents" / "000000123"
    assert IncidentKeeper(tmp_path, part="critic").place(7).name == "000000007-critic"
    assert IncidentKeeper(tmp_path).place(7, rank=1, world_size=2) == tmp_path / "rank1" / "incidents" / "000000007"


def test_there_is_room_until_there_are_too_many_and_once_for_each_step(tmp_path):
    keeper = IncidentKeeper(tmp_path, most=2)
    assert keeper.has_room(1)
    keeper.place(1).mkdir(parents=True)
    assert not keeper.has_room(1)
    assert keeper.has_room(2)
    (keeper.root() / "notes of somebody").mkdir()
    assert keeper.has_room(2)
    keeper.place(2).mkdir()
    assert not keeper.has_room(3)


@pytest.mark.parametrize("settings", [{"most": 0}, {"most_bytes": 0}, {"part": "../elsewhere"}])
def test_settings_without_a_meaning_are_refused(settings):
    with pytest.raises(SettingError):
        IncidentKeeper("runs", **settings)
