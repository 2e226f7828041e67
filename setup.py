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
        for path in Path("nbs").glob("*/*.ipynb"):
            text = path.read_text(encoding="utf-8")
            if path.parts[1] == "use" or '"parameters"' not in text:
                continue
            page = json.loads(text)
            for cell in page["cells"]:
                if cell["cell_type"] == "code":
                    cell["outputs"] = []
            copy = target / path.parts[1] / path.name
            copy.parent.mkdir(exist_ok=True)
            copy.write_text(json.dumps(page), encoding="utf-8")


EXTRAS = "run dev flower".split()
PYTHONS = "3.11 3.12 3.13".split()


def required(extra):
    "What an extra asks for; tests and pages need what runs need too."
    words = settings[f"{extra}_requirements"].split()
    return required("run") + words if extra == "dev" else words


setup(
    cmdclass={"build_py": BuildWithNotebooks},
    name=settings["lib_name"],
    version=settings["version"],
    description=settings["description"],
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    author=settings["author"],
    keywords=settings["keywords"].split(),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: {version}" for version in PYTHONS),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Security :: Cryptography",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["dpcomm", "dpcomm.*"]),
    package_data={
        "dpcomm": [
            "py.typed",
            "assets/*.mplstyle",
            "assets/*.md",
            "assets/papers/*.toml",
            "assets/results/*/*.jsonl",
            "assets/bench/*.jsonl",
            "assets/flower/*.toml",
            "assets/flower/*/*.toml",
            "assets/secagg/*.jsonl",
        ]
    },
    python_requires=f">={settings['min_python']}",
    install_requires=settings["requirements"].split(),
    extras_require={extra: required(extra) for extra in EXTRAS},
    entry_points={
        "console_scripts": [settings["console_scripts"]],
    },
    zip_safe=False,
)
