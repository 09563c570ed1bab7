"""Package metadata. One install line per runtime stands in the README."""

from pathlib import Path

from setuptools import find_packages, setup

JAX = "jax>=0.10.2,<0.13"

BASE = [
    JAX,
    "flax>=0.12.0",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.11.25",
    "numpy>=2.0",
    "ml-collections>=1.1",
    "absl-py>=2.0",
    "tensorboard>=2.18",
    "tqdm>=4.66",
]
EXTRAS = {
    "cuda": ["jax[cuda13]>=0.10.2,<0.13"],
    "tpu": ["jax[tpu]>=0.10.2,<0.13"],
    # Sources and verifiers beyond the built-in ones.
    "tasks": ["reasoning-gym==0.1.25", "math-verify==0.9.0", "pyarrow>=17"],
    # Task generators that ask a language model over HTTP. httpx2 is what openai speaks HTTP with, since its version 3.
    "llm": ["openai>=3,<4", "httpx2>=2.12", "tenacity>=9,<10"],
}
EXTRAS["test"] = ["pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", *EXTRAS["tasks"], *EXTRAS["llm"]]
EXTRAS["dev"] = [*EXTRAS["test"], "ruff==0.17.6", "pyright==1.1.414", "pre-commit>=3.7"]
EXTRAS["all"] = EXTRAS["dev"]

setup(
    name="dynrl",
    version="0.1.0",
    description="Reinforcement learning of language models from verifiable rewards in JAX, with dynamic sampling "
    "and dynamic data generation.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["dynrl", "dynrl.*"]),
    package_data={"dynrl": ["py.typed"]},
    install_requires=BASE,
    extras_require=EXTRAS,
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
