"""The HTML of the report. No script, no font, no picture from elsewhere: the page is the file."""

from __future__ import annotations

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.2rem 4rem; color: #1f2933; background: #fff;
       font: 16px/1.55 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .4rem; overflow-wrap: anywhere; }
p, li { overflow-wrap: anywhere; }
.verdict { font-size: 1.15rem; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .8rem; border-bottom: 2px solid #e4e7eb; padding-bottom: .3rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(11.5rem, 1fr)); gap: .7rem; }
.cards div { background: #f5f7fa; border-radius: .5rem; padding: .7rem .9rem; }
.cards b { display: block; font-size: 1.12rem; font-variant-numeric: tabular-nums; }
.cards span { color: #616e7c; font-size: .85rem; }
figure { margin: 1.6rem 0; }
figure img { width: 100%; height: auto; border: 1px solid #e4e7eb; border-radius: .5rem; }
figcaption { color: #616e7c; font-size: .92rem; margin-top: .3rem; }
figcaption b { color: #1f2933; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .6rem 0 1.2rem; font-size: .94rem; }
th, td { text-align: left; padding: .35rem 1.1rem .35rem 0; border-bottom: 1px solid #e4e7eb;
         vertical-align: top; font-variant-numeric: tabular-nums; }
td { white-space: nowrap; }
td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 6rem; }  /* a long name */
pre { background: #f5f7fa; border-radius: .5rem; padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; }
summary { cursor: pointer; margin: .5rem 0; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="verdict">$verdict</p>
$body
</body>
</html>
""")

SECTION = Template("<section><h2>$title</h2>$body</section>\n")

FIGURE = Template(
    '<figure><img alt="$title. $caption" src="data:image/png;base64,$data">'
    "<figcaption><b>$title.</b> $caption</figcaption></figure>\n"
)
