from pathlib import Path

# In a checkout patterns/ and kernels/ lie beside this folder; in a wheel, inside it.
if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parents[1]))
