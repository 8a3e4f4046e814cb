"""How a page looks, and what it does by itself: light or dark as the reader's system says, readable
on a phone."""

from __future__ import annotations

from twinserve.sim.report.palette import DARK, LIGHT

STYLE = f"""
:root{{color-scheme:light dark;--paper:{LIGHT};--ink:#1f2933;--quiet:#52606d;--grid:#dfe3e8;
  --soft:#f4f6f8;--note:#fff7e0;--on-note:#5c4a12;--good:#1b7a43;--link:#1d5fa8}}
@media (prefers-color-scheme:dark){{:root{{--paper:{DARK};--ink:#e4e8ec;--quiet:#a9b4bf;
  --grid:#323a44;--soft:#1e242b;--note:#38300f;--on-note:#f3e2a8;--good:#5fce8d;--link:#8ab8ee}}}}
*{{box-sizing:border-box}}
body{{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:var(--ink);
  background:var(--paper);max-width:1080px;margin:24px auto;padding:0 16px}}
h1{{font-size:24px;margin:0 0 4px;overflow-wrap:anywhere}}
h2{{font-size:20px;margin:36px 0 6px;border-bottom:2px solid var(--grid);overflow-wrap:anywhere}}
h3{{font-size:16px;margin:22px 0 6px;overflow-wrap:anywhere}}
p{{margin:4px 0 10px;color:var(--quiet);overflow-wrap:anywhere}}
a{{color:var(--link)}}
nav{{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0}}
figure{{margin:0 0 28px}}
figcaption{{font-size:13px}}
figcaption p{{margin:2px 0}}
img,svg{{max-width:100%;width:100%;height:auto}}
.plot{{min-height:60px}}
.key{{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:0 0 6px;padding:0;
  font-size:13px}}
.key i{{display:inline-block;width:22px;border-top:3px;margin-right:6px;vertical-align:middle}}
.key em{{font-style:normal;margin-right:6px}}
.key button{{font:inherit;color:inherit;background:none;border:0;padding:5px 0;cursor:pointer;
  text-align:left;overflow-wrap:anywhere}}
.key button[aria-pressed=false]{{opacity:.4;text-decoration:line-through}}
.wide{{overflow-x:auto;margin:6px 0 12px}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}}
th,td{{padding:3px 14px 3px 0;text-align:right;border-bottom:1px solid var(--grid);
  vertical-align:top}}
th:first-child,td:first-child{{text-align:left}}
tr.section td{{font-weight:600;padding-top:12px}}
td.best{{font-weight:600;color:var(--good)}}
.settings td,.settings th{{text-align:left;overflow-wrap:anywhere;min-width:90px}}
.note{{background:var(--note);padding:6px 10px;border-radius:4px;color:var(--on-note)}}
pre{{background:var(--soft);padding:10px;font-size:12px;white-space:pre-wrap;
  overflow-wrap:anywhere}}
summary{{cursor:pointer;padding:4px 0}}
h2,h3{{break-after:avoid}}
figure,tr,li{{break-inside:avoid}}
@media (max-width:600px){{body{{margin:12px auto;padding:0 10px}}th,td{{padding-right:10px}}}}
@media print{{body{{max-width:none;margin:0;font-size:10pt}}nav,summary,noscript{{display:none}}
  .wide{{overflow:visible}}table{{font-size:7pt}}th,td{{padding-right:5px}}}}
""".strip()

# Each chart is drawn from the JSON beside it; ink and grid are those of the page, now and when the
# reader's system turns dark or light.
SCRIPT = """
(function(){
"use strict";
const roots=new Map();
function colour(name){
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
function paint(root){
  const ink=colour("--ink"),grid=colour("--grid");
  for(const part of [...root.below,...root.left,...root.center]){
    if("axis_label_text_color" in part){
      part.setv({axis_label_text_color:ink,major_label_text_color:ink,axis_line_color:grid,
        major_tick_line_color:grid,minor_tick_line_color:null,axis_label_text_font_style:"normal"});
    }else if("grid_line_color" in part){
      part.setv({grid_line_color:grid});
    }
  }
}
async function draw(){
  for(const script of document.querySelectorAll("script[data-chart]")){
    const views=await Bokeh.embed.embed_item(JSON.parse(script.textContent));
    const root=(Array.isArray(views)?views:[...views])[0].model;
    roots.set(script.dataset.chart,root);
    paint(root);
  }
  document.body.dataset.drawn=roots.size;
}
document.addEventListener("click",function(event){
  const button=event.target.closest(".key button");
  if(!button)return;
  const shown=button.getAttribute("aria-pressed")!=="true";
  button.setAttribute("aria-pressed",shown);
  const root=roots.get(button.closest("figure").querySelector(".plot").id);
  for(const part of root.renderers)if(part.name===button.dataset.name)part.visible=shown;
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change",function(){
  for(const root of roots.values())paint(root);
});
draw();
})();
""".strip()
