"""The committed tables and the sample of a log are those that the code makes."""

import re

from tables import page


def test_the_page_and_the_sample_of_a_log_are_what_the_code_makes():
    assert page.page() == page.PAGE.read_text(), "run PYTHONPATH=.:tests/helpers python tests/tables/page.py"
    assert "\n776 tensors, 11,891,178,560 parameters" in page.PAGE.read_text()
    found, want = (re.sub(r'"lineno": \d+', "", text) for text in (page.sample(), page.SAMPLE.read_text()))
    assert found == want
