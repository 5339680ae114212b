"""Pages of the server in a real browser."""

from __future__ import annotations

import shutil
from typing import Any

CHROMIUM = shutil.which("chromium")
PHONE = {"width": 360, "height": 740}
OVERFLOWS = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
# WCAG's contrast of every element that has a text of its own
CONTRASTS = r"""() => {
    const parse = (color) => color.match(/[\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (element) => {
        for (; element; element = element.parentElement) {
            const color = parse(getComputedStyle(element).backgroundColor);
            if (color.length === 3 || color[3] > 0) return color;
        }
        return [255, 255, 255];
    };
    return [...document.body.querySelectorAll("*")]
        .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
        .filter((e) => e.checkVisibility())
        .map((e) => {
            const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
            return [e.textContent.trim().slice(0, 40), (a + 0.05) / (b + 0.05)];
        });
}"""


def launch(driver: Any) -> Any:
    return driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
