"""What builds wheels, where no compiler is needed for it."""

from __future__ import annotations

from page import addresses, links

README = (
    "![a picture\nof it](docs/a.svg) [one](docs/faq.md) [two](docs/memory.md#part), [out](https://x.test/) [here](#p)\n"
)


def test_links_of_the_page_lead_to_the_tag_of_the_version_and_stay_within_it_otherwise() -> None:
    at = "https://host.test/nnburst"
    assert links(README, at, "v1.0") == (
        f"![a picture\nof it]({at}/raw/v1.0/docs/a.svg) [one]({at}/blob/v1.0/docs/faq.md) "
        f"[two]({at}/blob/v1.0/docs/memory.md#part), [out](https://x.test/) [here](#p)\n"
    )
    assert set(addresses(at, "v1.0").values()) >= {at, f"{at}/issues"}


def test_page_of_a_package_without_an_address_has_no_dead_links() -> None:
    assert links(README, "", "v1.0") == " one two, [out](https://x.test/) [here](#p)\n"
    assert addresses("", "v1.0") == {}
