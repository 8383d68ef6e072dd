from tests import reference


def test_reference_pages_of_flags_and_hyper_parameters_are_up_to_date():
    """If this test fails, run: python -m tests.reference."""
    for name, text in reference.pages().items():
        assert (reference.ROOT / name).read_text() == text, name
        assert "`--learning_rate`" in text or "`learning_rate`" in text
