"""Tables and studies are selected by name."""

import pytest

from modeling_supclap.recipes.studies.select import find_studies, find_tables


@pytest.mark.parametrize("names", [["supclap/table99"], []])
def test_the_error_of_an_unknown_table_lists_the_known_ones(names):
    with pytest.raises(ValueError, match=r"atri/table1.*supclap/table14"):
        find_tables(names)


def test_tables_that_cannot_be_reproduced_have_a_reason():
    with pytest.raises(ValueError, match="supclap/table10"):
        find_tables(["supclap/table10"])
    assert "supclap/table10" not in find_tables(["supclap"])


def test_an_unknown_study_is_named():
    with pytest.raises(ValueError, match="evidence/kcll"):
        find_studies(["evidence/kcll"])
