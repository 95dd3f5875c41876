// Clicks and keys in the hits. Gradio runs this once for the component, whose hits change later.
const hits = () => [...element.querySelectorAll(".hit")];

function choose(hit) {
  hits().forEach(each => { each.classList.toggle("current", each === hit); each.querySelector("audio")?.pause(); });
  hit.scrollIntoView({ block: "center" });
  const player = hit.querySelector("audio");
  if (!player) return;
  player.currentTime = Number(hit.dataset.start);
  player.play();
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // only pages of this machine, or with https, have a clipboard
    const field = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.textContent = "Copied";
}

element.addEventListener("click", event => {
  const hit = event.target.closest(".hit");
  const graph = event.target.closest("[data-from]");
  if (event.target.matches(".copy")) copy(event.target, hit.dataset.file);
  if (event.target.matches(".similar")) {
    trigger("similar", { file: hit.dataset.file, start: Number(hit.dataset.start), end: Number(hit.dataset.end) });
  }
  const player = hit?.querySelector("audio");
  if (graph && player) {
    const box = graph.getBoundingClientRect(), from = Number(graph.dataset.from), to = Number(graph.dataset.to);
    player.currentTime = from + (event.clientX - box.left) / box.width * (to - from);
    player.play();
  }
});

document.addEventListener("keydown", event => {
  const step = { n: 1, p: -1 }[event.key.toLowerCase()];
  if (!step || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
  const all = hits(), now = all.findIndex(hit => hit.matches(".current"));
  const next = all[now < 0 && step < 0 ? all.length - 1 : now + step];
  if (next) choose(next);
});
