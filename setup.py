"Package metadata lives in settings.ini; this file only hands it to setuptools."

import json
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

config = ConfigParser(delimiters=["="])
config.read("settings.ini", encoding="utf-8")
settings = config["DEFAULT"]


class BuildWithNotebooks(build_py):
    "Adds the notebooks of the experiments, without outputs, to a wheel."

    def run(self):
        super().run()
        target = Path(self.build_lib, "dpcomm", "assets", "experiments")
        if self.editable_mode:
            return
        target.mkdir(parents=True, exist_ok=True)
        for path in Path("nbs", "experiments").glob("*.ipynb"):
            page = json.loads(path.read_text(encoding="utf-8"))
            for cell in page["cells"]:
                if cell["cell_type"] == "code":
                    cell["outputs"] = []
            (target / path.name).write_text(json.dumps(page), encoding="utf-8")


setup(
    cmdclass={"build_py": BuildWithNotebooks},
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author=settings["author"],
    url=settings["git_url"],
    keywords=settings["keywords"].split(),
    classifiers=["Operating System :: POSIX :: Linux", "Operating System :: MacOS"],
    packages=find_packages(include=["dpcomm", "dpcomm.*"]),
    package_data={
        "dpcomm": [
            "py.typed",
            "assets/checked.json",
            "assets/experiments.json",
            "assets/papers/*.toml",
            "assets/results/*/*.jsonl",
            "assets/bench/*.jsonl",
            "assets/flower/*.jsonl",
            "assets/peers/*.jsonl",
            "assets/secagg/*.jsonl",
        ]
    },
    python_requires=f">={settings['min_python']}",
    install_requires=settings["requirements"].split(),
    extras_require={
        name: settings[f"{name}_requirements"].split()
        for name in ("dev", "cluster", "flower", "bench", "opacus")
    },
    entry_points={"console_scripts": [settings["console_scripts"]]},
    zip_safe=False,
)
