"""A reference does not keep an object alive where its class allows that."""

from surefoot.core.weak_reference import weak_reference


def test_an_object_dies_as_it_would_have():
    class Plain:
        pass

    thing = Plain()
    held = weak_reference(thing)
    assert held() is thing
    del thing
    assert held() is None


def test_what_cannot_be_referenced_weakly_is_kept():
    held = weak_reference((1, 2))
    assert held() == (1, 2)
