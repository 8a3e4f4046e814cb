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
