"""The built-in page in headless Chromium, by keyboard, on a wide and a narrow screen.

    python page_client.py http://127.0.0.1:8000 [FOLDER FOR SCREENSHOTS]

Needs Debian's chromium and chromium-driver. The model must call the tool when it is asked for the weather.
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

    # Two settings side by side, by arrow key.
    one("#tab-chat").send_keys(Keys.ARROW_RIGHT)
    assert one("#compare").is_displayed() and not one("#chat").is_displayed()
    one("#run").send_keys(Keys.ENTER)
    wait.until(lambda _: "ms a token" in one("#verdict").text)
    assert one("#verdict").text.startswith("The same tokens"), one("#verdict").text
    browser.save_screenshot(str(folder / "compare.png"))

    # A narrow screen: nothing is wider than it, and everything can be reached.
    one("#tab-chat").click()
    browser.set_window_size(390, 780)
    browser.get(base_url)
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
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe, severe
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else Path(tempfile.mkdtemp()))
