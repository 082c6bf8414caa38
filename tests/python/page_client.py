"""The built-in page in headless Chromium, by keyboard, on a wide and a narrow screen.

    python page_client.py http://127.0.0.1:8000 [FOLDER FOR SCREENSHOTS]

Needs Debian's chromium and chromium-driver. The model must call the tool when it is asked for the weather; the server
says that it has the plugins 0003, 0020 and 0090.
"""

import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def main(base_url: str, folder: Path) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in [*FLAGS, f"--user-data-dir={tempfile.mkdtemp()}", "--window-size=1280,860"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        visit(browser, base_url, folder)
    finally:
        browser.quit()


def visit(browser, base_url: str, folder: Path) -> None:
    wait = WebDriverWait(browser, 60)
    one = lambda selector: browser.find_element(By.CSS_SELECTOR, selector)  # noqa: E731
    all_of = lambda selector: browser.find_elements(By.CSS_SELECTOR, selector)  # noqa: E731
    focused = lambda: browser.switch_to.active_element  # noqa: E731
    browser.get(base_url)
    wait.until(lambda _: "context" in one("#model").text)
    browser.save_screenshot(str(folder / "start.png"))

    # The field has the focus: type and send.
    focused().send_keys("Tell me something", Keys.ENTER)
    wait.until(lambda _: len(all_of(".reply .facts")) == 1 and "out" in all_of(".reply .facts")[0].text)
    assert one(".reply .answer").text, "no answer"
    assert one("details.thought div").get_attribute("textContent"), "no reasoning"
    assert "tokens/s" in one(".reply .facts").text, one(".reply .facts").text
    wait.until(lambda _: one("#g-rate").text != "–")
    assert " of " in one("#g-slots").text
    browser.save_screenshot(str(folder / "chat.png"))

    # A call, its result, and the reply to it.
    one("#offer").send_keys(Keys.SPACE)
    one("#text").send_keys("What is the weather in Paris?", Keys.ENTER)
    wait.until(lambda _: all_of(".call input"))
    assert "weather" in one(".call strong").text and "city" in one(".call code").text
    browser.save_screenshot(str(folder / "call.png"))
    assert focused() == one(".call input"), "the field for the result has the focus"
    focused().send_keys("sunny", Keys.ENTER)
    wait.until(lambda _: len(all_of(".reply")) == 3)
    one("#text").send_keys(Keys.ESCAPE)

    # The loaded plugins, each with its knobs and their values.
    named = [item.text for item in all_of("#plugins summary")]
    assert len(named) == 3 and named[1].startswith("0020-suffix-drafter"), named
    all_of("#plugins summary")[1].send_keys(Keys.ENTER)
    keys = [item.text for item in all_of("#plugins dt") if item.is_displayed()]
    assert "lookup_min" in keys, keys
    browser.save_screenshot(str(folder / "plugins.png"))

    # Two settings side by side, by arrow key; a knob of the request differs.
    one("#tab-chat").send_keys(Keys.ARROW_RIGHT)
    assert one("#compare").is_displayed() and not one("#chat").is_displayed()
    knob = all_of(".side [data-knob=lookup_min]")[1]
    knob.send_keys("7")
    one("#pairs").clear()
    one("#pairs").send_keys("2")
    one("#run").send_keys(Keys.ENTER)
    wait.until(lambda _: "ms a token" in one("#verdict").text)
    assert one("#pairs").get_attribute("value") == "2"
    assert one("#verdict").text.startswith("The same tokens"), one("#verdict").text
    heads = [cell.text for cell in all_of("#timings tbody th")]
    assert heads[:3] == ["whole reply", "first text", "prompt"], heads
    assert all(" ms" in cell.text for cell in all_of("#timings tbody tr:first-child td")[:2])
    browser.save_screenshot(str(folder / "compare.png"))
    # What the server refuses is told.
    knob.clear()
    knob.send_keys("99")
    one("#run").send_keys(Keys.ENTER)
    wait.until(lambda _: "it must be a whole number from 1 to 64" in one("#verdict").text)

    # A narrow screen: nothing is wider than it, and everything can be reached.
    one("#tab-chat").click()
    # Windows have a least width, screens do not.
    screen = {"width": 320, "height": 640, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser.get(base_url)
    assert browser.execute_script("return innerWidth") == 320
    wait.until(lambda _: "context" in one("#model").text)
    focused().send_keys("Tell me something", Keys.ENTER)
    wait.until(lambda _: all_of(".reply .facts") and "out" in all_of(".reply .facts")[0].text)
    wide = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{wide} pixels too wide"
    box = one("#send").rect
    height = browser.execute_script("return innerHeight")
    assert box["y"] + box["height"] <= height, (box, height)
    browser.save_screenshot(str(folder / "narrow.png"))
    one("summary.fold").click()
    assert one("#effort").is_displayed()
    browser.save_screenshot(str(folder / "narrow-settings.png"))
    one("#tab-chat").send_keys(Keys.ARROW_RIGHT)
    wide = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{wide} pixels too wide"
    browser.save_screenshot(str(folder / "narrow-compare.png"))
    # The browser notes the refusal above as well.
    severe = [e for e in browser.get_log("browser") if e["level"] == "SEVERE" and "status of 400" not in e["message"]]
    assert not severe, severe
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp()))
