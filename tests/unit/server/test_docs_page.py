"""`/docs` of a server: files without a key, a strict policy, and nothing from other origins."""

from __future__ import annotations

import re

import pytest

from pdserve.config.access_group import AccessConfig
from pdserve.http.page_files import DOCS_POLICY, page_headers, read_docs_files
from pdserve.server.text.tokenizer import Tokenizer
from tests.unit.server.server_kit import bench

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]


async def test_the_pages_need_no_key_and_the_document_does(tokenizer: Tokenizer) -> None:
    async with bench(tokenizer, access=AccessConfig(api_key="k")) as b:
        page = await b.http.get("/docs")
        assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"] == page_headers(DOCS_POLICY)["Content-Security-Policy"]
        linked = re.findall(r'(?:href|src)="(docs/[^"]+)"', page.text)
        assert sorted(linked) == ["docs/docs.css", "docs/docs.js"]
        for path in (*linked, "docs/schema.js"):
            assert (await b.http.get(f"/{path}")).status_code == 200
        assert (await b.http.get("/docs/none.js")).status_code == 404
        assert (await b.http.get("/openapi.json")).status_code == 401
        document = (await b.http.get("/openapi.json", headers={"Authorization": "Bearer k"})).json()
        assert "/docs" not in document["paths"]


async def test_no_file_needs_more_than_the_policy_allows() -> None:
    files = read_docs_files()
    assert files.keys() == {"index.html", "docs.css", "docs.js", "schema.js"}
    assert DOCS_POLICY["default-src"] == DOCS_POLICY["trusted-types"] == "'none'"
    for name, file in files.items():
        text = file.data.decode()
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|eval\(| style=|url\(", text), name
    assert not re.search(r"<script(?! type=\"module\" src)| on\w+=", files["index.html"].data.decode())
