"""The documentation site: MyST pages, executed lessons, API from docstrings, tables from the code itself.

::

    sphinx-build -W --keep-going docs docs/_build/html
    sphinx-build -W --keep-going -D nb_execution_mode=off docs docs/_build/html    # no kernel is run: seconds

Before it reads the pages, a build writes ``docs/generated`` (see :mod:`generators`) and copies ``lessons/*.ipynb`` to
``docs/lessons``; git ignores both. No network is needed to build; a browser fetches MathJax for pages with formulas.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module, metadata
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]
# The kernels that execute lessons import the same package.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

import generators  # noqa: E402
import generators.autodoc  # noqa: E402

# A build makes millions of nodes, nearly all of which stay: looking through them for garbage as often as Python does
# by itself takes a quarter of its time.
gc.set_threshold(100_000, 20, 50)

project = "flashnumba"
copyright = "flashnumba's authors, Apache-2.0"
try:
    release = metadata.version("flashnumba")
except metadata.PackageNotFoundError:
    release = ""

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "generated", "**/.ipynb_checkpoints", "results/README.md", "examples/README.md"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# A lesson shows what the code does now: nothing is taken from an earlier run, and a cell that raises fails the build.
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_markdown_format = "myst"  # tables that a cell displays

autodoc_default_options = {"members": True, "member-order": "bysource", "no-value": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("ArrayLike", "DTypeLike", "State")}
add_module_names = False
autodoc_use_legacy_class_based = True  # for generators.autodoc, from Sphinx 9 on
python_use_unqualified_type_names = True
napoleon_use_ivar = True
napoleon_use_rtype = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "flashnumba"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def generate(app):
    """Write what is made from the code; with execution off nothing that runs a kernel."""
    generators.write(DOCS, execute=app.config.nb_execution_mode != "off")


def source_module(app, module, attribute):
    """Where viewcode looks for a name: an alias such as ``State = tuple[...]`` claims to come from builtins."""
    value = getattr(import_module(module), attribute.split(".")[0], None)
    return module if getattr(value, "__module__", "") == "builtins" else None


def share_navigation(app, pagename, templatename, context, doctree):
    """The tree beside a page of source code: no such page is in it, so it is one for all in folders of equal depth.
    Made for each, it would take a third of a build."""
    if not pagename.startswith("_modules/"):
        return
    made, depth, whole = app.navigation, pagename.count("/"), context["toctree"]

    def toctree(**options):
        key = depth, *sorted(options.items())
        if key not in made:
            made[key] = whole(**options)
        return made[key]

    context["toctree"] = toctree


def setup(app):
    app.navigation = {}
    app.connect("html-page-context", share_navigation, priority=400)  # before the theme asks for the tree
    generators.autodoc.setup(app)
    app.connect("builder-inited", generate)
    app.connect("viewcode-follow-imported", source_module)
