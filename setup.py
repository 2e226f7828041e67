"Package metadata lives in settings.ini; this file only hands it to setuptools."

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
settings = config["DEFAULT"]

setup(
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author=settings["author"],
    url=settings["git_url"],
    keywords=settings["keywords"].split(),
    packages=find_packages(include=["dpcomm", "dpcomm.*"]),
    package_data={
        "dpcomm": [
            "assets/papers/*.toml",
            "assets/results/*/*.jsonl",
            "assets/bench/*.jsonl",
            "assets/flower/*.jsonl",
        ]
    },
    python_requires=f">={settings['min_python']}",
    install_requires=settings["requirements"].split(),
    extras_require={
        name: settings[f"{name}_requirements"].split()
        for name in ("dev", "cluster", "flower", "bench")
    },
    entry_points={"console_scripts": [settings["console_scripts"]]},
    zip_safe=False,
)
