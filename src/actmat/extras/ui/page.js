"use strict";
const token = new URLSearchParams(location.search).get("token");
const byId = (id) => document.getElementById(id);
const form = { recipe: { base: "", experts: [], method: "auto", options: {} }, out: "", grouping: "none", scales: {}, settings: {} };
let methods = [], recommended = [], asked = 0, planned = false, running = false, jobTimer = null, chosen = null, tab = "folder";

function el(tag, fields, ...children) {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

async function ask(question, data = {}) {
  let got;
  try {
    got = await fetch(`/api/${question}`, { method: "POST", headers: { "X-Actmat-Token": token }, body: JSON.stringify(data) });
  } catch {
    return { ok: false, headline: "actmat ui does not answer: it has ended. Start it again in the terminal.", problems: [] };
  }
  return got.ok ? got.json() : { ok: false, headline: await got.text(), problems: [] };
}

const pageLink = (path, text) => el("a", { href: `${path}?token=${encodeURIComponent(token)}`, target: "_blank", rel: "noopener" }, text);

function problems(found) {
  const listed = found.problems.filter((p) => p !== found.headline);
  return el("div", { className: "problems" }, el("p", { className: "bad" }, found.headline), el("ul", {}, ...listed.map((p) => el("li", {}, p))));
}

/* Text with `code` between backticks. */
const inCode = (text) => text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));

/* The form that is sent: empty fields are left out. */
function sent() {
  const recipe = { ...form.recipe, experts: form.recipe.experts.filter((e) => e.path) };
  if (!recipe.base) delete recipe.base;
  return { ...form, recipe };
}

let waiting = null;
function changed() {
  sessionStorage.setItem("form", JSON.stringify(form));
  clearTimeout(waiting);
  waiting = setTimeout(plan, 250);
}

/* Inputs that have to be chosen before anything can be planned. */
function missing() {
  const count = form.recipe.experts.filter((e) => e.path).length;
  return count === 0 ? ["a base (adapters need none)", "the experts"].slice(form.recipe.base ? 1 : 0) : [];
}

/* Buttons that need a plan; `merge` needs a place for its output, too. */
function enable() {
  const waits = running || !planned;
  byId("merge").disabled = waits || !form.out;
  byId("diagnose-now").disabled = waits;
  byId("compare").disabled = running || !byId("first").value.trim() || !byId("second").value.trim();
  byId("out-missing").hidden = !planned || Boolean(form.out);
}

function showMissing(absent) {
  byId("status").replaceChildren(el("p", { className: "note" }, `Choose ${absent.join(" and ")}.`));
  for (const id of ["recipe", "command", "tune"]) byId(id).textContent = "";
  byId("why").hidden = true;
  byId("plan").replaceChildren(el("p", { className: "note" }, "The plan appears when the inputs are chosen."));
}

async function plan() {
  const mine = ++asked, absent = missing();
  planned = false;
  enable();
  if (absent.length) return showMissing(absent);
  byId("status").setAttribute("aria-busy", "true");
  const found = await ask("plan", { form: sent() });
  if (mine !== asked) return; // the form has changed since
  byId("status").removeAttribute("aria-busy");
  const answer = found.ok ? found.answer : found;
  byId("recipe").textContent = answer.yaml ?? "";
  byId("command").textContent = answer.command ?? "";
  byId("tune").textContent = answer.tune ?? "";
  showWhy(answer);
  if (answer.problems) {
    byId("plan").replaceChildren(el("p", { className: "note" }, "The plan appears when the inputs fit together."));
    return byId("status").replaceChildren(problems(answer));
  }
  planned = true;
  enable();
  byId("status").replaceChildren(el("p", { className: "good" }, "The inputs fit together."), el("p", {}, answer.counts),
    el("p", {}, answer.traffic), ...answer.notes.filter((n) => !n.startsWith("auto: ")).map((n) => el("p", { className: "caveat" }, n)));
  const rows = answer.rows.map((r) => el("tr", {}, el("td", {}, String(r.count)), el("td", { className: "action" }, r.action),
    el("td", {}, r.reason, ...r.patterns.map((p) => el("div", { className: "dim" }, el("code", {}, p))),
      r.more ? el("div", { className: "dim" }, `and ${r.more} more patterns`) : null)));
  const titles = [answer.output === "adapter" ? "modules" : "tensors", "action", "which, and why"];
  const head = el("thead", {}, el("tr", {}, ...titles.map((t) => el("th", {}, t))));
  byId("plan").replaceChildren(el("table", {}, head, el("tbody", {}, ...rows)));
  if (form.grouping !== "none") showGroups();
}

/* Inputs */

function showExperts() {
  byId("experts").replaceChildren(...form.recipe.experts.map((expert, i) => {
    const input = (field, more) => el("input", { value: expert[field] ?? "", spellcheck: false, autocomplete: "off", ...more,
      onchange: (event) => {
        const value = event.target.value.trim();
        if (value === "") delete expert[field]; else expert[field] = field === "weight" ? Number(value) : value;
        changed();
      } });
    const place = input("path", { placeholder: "folder, file, hub id or URL", id: `expert-${i + 1}`, ariaLabel: `Expert ${i + 1}` });
    return el("div", { className: "expert" },
      el("label", { htmlFor: `expert-${i + 1}` }, `Expert ${i + 1}`),
      el("div", { className: "row" }, place, el("button", { onclick: () => browse((path) => { expert.path = path; showExperts(); changed(); }) }, "Choose"),
        el("button", { ariaLabel: `Remove expert ${i + 1}`, onclick: () => { form.recipe.experts.splice(i, 1); showExperts(); changed(); } }, "Remove")),
      el("div", { className: "row" }, el("label", {}, "name ", input("name", { className: "name", placeholder: "from the path" })),
        typeof (expert.weight ?? 1) === "number"
          ? el("label", {}, "weight ", input("weight", { type: "number", step: "0.1", placeholder: "1", className: "number" }))
          : el("span", { className: "note" }, "weight varies, see the recipe")));
  }));
}

/* Method */

const AUTO = { name: "auto", summary: "The method that measurements prefer for experts like these; the plan names it, with the reason.",
  equation: "", needs: { data: [], takes_weights: true }, reference: "", options: [] };
const BASICS = ["average", "linear", "task_arithmetic", "ties", "dare", "slerp"];
const GROUPS = ["Recommended", "Basics", "On the matrices of linear layers", "On single weights and whole tensors", "With statistics of data"];

function groupOf(method) {
  if (method.name === "auto") return GROUPS[0];
  if (BASICS.includes(method.name)) return GROUPS[1];
  if (recommended.includes(method.name)) return GROUPS[0];
  if (method.needs.data.length) return GROUPS[4];
  return method.acts_on === "matrix" ? GROUPS[2] : GROUPS[3];
}

function methodOption(method) {
  const says = method.name === "auto" ? "what measurements prefer for experts like these" : method.summary.replace(/\.$/, "");
  return el("option", { value: method.name }, `${method.name}: ${says.length > 80 ? `${says.slice(0, 79)}…` : says}`);
}

/* The method that `auto` takes, with its reason, once the plan has looked at the experts. */
function showWhy(answer) {
  const reason = (answer.notes ?? []).find((n) => n.startsWith("auto: "));
  byId("why").hidden = form.recipe.method !== "auto" || !answer.method;
  byId("why").textContent = `For these experts: ${reason ? reason.slice(6) : answer.method}.`;
}

function showMethod() {
  const method = methods.find((m) => m.name === form.recipe.method) ?? methods[0];
  byId("method").value = method.name;
  byId("summary").textContent = method.summary;
  byId("equation").textContent = method.equation;
  const data = method.needs.data.length ? `Needs ${method.needs.data.join(", ")} of data: name the files in a recipe. ` : "Needs no data. ";
  byId("needs").textContent = data + (method.needs.takes_weights ? "" : "Takes no weights. ") + method.reference;
  const count = method.options.length;
  byId("option-title").textContent = count === 1 ? "1 option" : `${count} options`;
  byId("option-list").hidden = count === 0;
  byId("options").replaceChildren(...method.options.map((o) => el("label", { className: "option" }, el("code", {}, o.name),
    el("input", { value: form.recipe.options[o.name] ?? "", placeholder: String(o.default ?? "automatic"), onchange: (event) => {
      if (event.target.value.trim() === "") delete form.recipe.options[o.name]; else form.recipe.options[o.name] = event.target.value.trim();
      changed();
    } }), el("small", {}, ...inCode(o.description), ` (${o.type}${o.bounds ? `, in ${o.bounds}` : ""})`))));
}

function showScale() {
  const scale = form.recipe.scale ?? 1, varies = typeof scale !== "number";
  for (const id of ["scale", "scale-range"]) { byId(id).disabled = varies; byId(id).value = varies ? "" : scale; }
}

function setScale(value) {
  if (value === 1) delete form.recipe.scale; else form.recipe.scale = value;
  showScale();
  changed();
}

async function showGroups() {
  if (form.grouping === "none") return byId("groups").replaceChildren();
  const found = await ask("groups", { form: sent() });
  if (!found.ok) return byId("groups").replaceChildren(el("p", { className: "note" }, "Groups appear when the inputs fit together."));
  byId("groups").replaceChildren(...found.answer.map((group) => {
    const set = (event) => {
      if (event.target.value === "") delete form.scales[group.name]; else form.scales[group.name] = Number(event.target.value);
      range.value = number.value = form.scales[group.name] ?? "";
      if (number.value === "") range.value = form.recipe.scale ?? 1;
      changed();
    };
    const own = form.scales[group.name];
    const range = el("input", { type: "range", min: 0, max: 2, step: 0.05, value: own ?? form.recipe.scale ?? 1, ariaLabel: group.name, onchange: set });
    const number = el("input", { type: "number", step: 0.05, className: "number", value: own ?? "", placeholder: String(form.recipe.scale ?? 1), ariaLabel: `scale of ${group.name}`, onchange: set });
    return el("div", { className: "field" }, `${group.name} (${group.tensors} tensors)`, el("span", { className: "row" }, range, number));
  }));
}

/* The dialog to choose */

function browse(then, start) {
  chosen = then;
  byId("browse").showModal();
  showTab("folder", start ?? "");
}

async function showTab(name, place) {
  tab = name;
  document.querySelectorAll("[data-tab]").forEach((b) => b.setAttribute("aria-selected", String(b.dataset.tab === tab)));
  byId("place").value = place;
  byId("place").placeholder = { folder: "a folder", cache: "filter", hub: "words to look for on the hub" }[tab];
  byId("use").hidden = tab !== "folder";
  byId("entries").replaceChildren();
  byId("browse-note").textContent = "";
  if (tab === "hub" && !place) return;
  const found = await ask(tab, tab === "folder" ? { path: place } : { words: place });
  if (!found.ok) { byId("browse-note").textContent = found.headline; return; }
  if (tab === "folder") showFolder(found.answer);
  else {
    const rows = found.answer.filter((m) => m.path.includes(place) || tab === "hub");
    byId("browse-note").textContent = rows.length ? "" : "Nothing was found.";
    byId("entries").replaceChildren(...rows.map((m) => el("li", {}, el("span", {}, m.path), el("button", { onclick: () => use(m.path) }, "Use"))));
  }
}

function showFolder(folder) {
  byId("place").value = folder.path;
  const says = { checkpoint: "This folder is a checkpoint.", adapter: "This folder is an adapter.", merged: "This folder is a merged model." };
  byId("browse-note").textContent = (says[folder.kind] ?? "") + (folder.left_out ? ` ${folder.left_out} more entries are not shown.` : "");
  const up = el("li", {}, el("button", { onclick: () => showTab("folder", folder.parent) }, ".. (up)"));
  byId("entries").replaceChildren(up, ...folder.entries.map((e) => el("li", {},
    e.kind === "file" ? el("span", {}, e.name) : el("button", { onclick: () => showTab("folder", e.path) }, `${e.name}/`),
    e.kind ? el("span", { className: "badge" }, e.kind) : null,
    e.kind ? el("button", { onclick: () => use(e.path), ariaLabel: `Use ${e.name}` }, "Use") : null)));
}

function use(path) {
  byId("browse").close();
  chosen(path);
}

/* Jobs */

async function run(job) {
  const found = await ask("run", job);
  if (!found.ok) return byId("job").replaceChildren(problems(found));
  watch();
}

async function watch() {
  clearTimeout(jobTimer);
  const found = await ask("job");
  if (!found.ok) return byId("job").replaceChildren(problems(found));
  showJob(found.answer);
  if (found.answer.state === "running") jobTimer = setTimeout(watch, 300);
}

function showJob(job) {
  running = job.state === "running";
  enable();
  byId("stop").hidden = !running;
  byId("stop").disabled = Boolean(job.stopping);
  const notes = (job.notes ?? []).filter((n) => !n.startsWith("auto: ")).map((n) => el("p", { className: "caveat" }, n));
  const doing = { merge: "merging", diagnose: "measuring", compare: "comparing" }[job.do];
  const shown = {
    idle: () => [],
    running: () => [el("progress", job.total ? { max: job.total, value: job.done } : {}),
      el("p", { className: "note" }, job.stopping ? "stopping; what is done is kept ..." : job.total ? `${doing}: ${job.done} of ${job.total} tensors` : `${doing}: reading headers ...`)],
    done: () => finished(job),
    stopped: () => [el("p", {}, "Stopped. The same merge goes on where it stopped.")],
    failed: () => [problems(job)],
  }[job.state]();
  byId("job").replaceChildren(...shown, ...notes);
}

function finished(job) {
  const link = job.page ? el("p", {}, pageLink(job.page, job.do === "compare" ? "Open the comparison" : "Open the report")) : null;
  const found = job.issues === null || job.issues === undefined ? "" : job.issues ? ` The checks found ${job.issues} issue(s).` : " The checks found no issue.";
  if (job.do !== "merge") {
    const said = job.do === "compare" ? `${job.differing} tensors differ.` : `Measured.${found}`;
    return [el("p", { className: "good" }, said), link];
  }
  const [first, second] = [byId("first"), byId("second")]; // the last two merges are offered for comparison
  if (!first.value) first.value = job.out;
  else if (first.value !== job.out) second.value = job.out;
  enable();
  const how = job.was_finished ? "was finished before; all its tensors are intact." : `is complete: ${job.tensors} tensors in ${job.seconds.toFixed(1)} s.`;
  return [el("p", { className: job.issues ? "bad" : "good" }, el("code", {}, job.out), ` ${how}${found}`), link].filter(Boolean);
}

/* Wiring */

function show() {
  byId("base").value = form.recipe.base ?? "";
  byId("out").value = form.out;
  byId("grouping").value = form.grouping;
  for (const id of ["dtype", "to"]) byId(id).value = form.recipe[id] ?? "";
  for (const id of ["device", "max_memory", "threads"]) byId(id).value = form.settings[id] ?? "";
  for (const id of ["diagnose", "overwrite"]) byId(id).checked = Boolean(form.settings[id]);
  showExperts();
  showMethod();
  showScale();
  showGroups();
}

function wire() {
  byId("base").onchange = (event) => { form.recipe.base = event.target.value.trim(); changed(); };
  byId("out").oninput = byId("out").onchange = (event) => { form.out = event.target.value.trim(); enable(); changed(); };
  byId("add").onclick = () => { form.recipe.experts.push({ path: "" }); showExperts(); };
  byId("method").onchange = (event) => { form.recipe.method = event.target.value; form.recipe.options = {}; showMethod(); changed(); };
  byId("scale").onchange = byId("scale-range").onchange = (event) => setScale(event.target.value === "" ? 1 : Number(event.target.value));
  byId("grouping").onchange = (event) => { form.grouping = event.target.value; form.scales = {}; showGroups(); changed(); };
  for (const id of ["dtype", "to"]) byId(id).onchange = (event) => { if (event.target.value) form.recipe[id] = event.target.value; else delete form.recipe[id]; changed(); };
  for (const id of ["device", "max_memory"]) byId(id).onchange = (event) => { form.settings[id] = event.target.value.trim(); changed(); };
  byId("threads").onchange = (event) => { form.settings.threads = event.target.value ? Number(event.target.value) : null; changed(); };
  for (const id of ["diagnose", "overwrite"]) byId(id).onchange = (event) => { form.settings[id] = event.target.checked; changed(); };
  byId("merge").onclick = () => run({ do: "merge", form: sent() });
  byId("diagnose-now").onclick = () => run({ do: "diagnose", form: sent() });
  byId("compare").onclick = () => run({ do: "compare", first: byId("first").value.trim(), second: byId("second").value.trim() });
  for (const id of ["first", "second"]) byId(id).oninput = byId(id).onchange = enable;
  byId("stop").onclick = async () => { await ask("stop"); watch(); };
  byId("load").onclick = () => browse(loadRecipe);
  byId("save").onclick = async () => {
    const found = await ask("save", { path: byId("recipe-path").value, form: sent() });
    byId("saved").textContent = found.ok ? `written to ${found.answer.path}` : found.headline;
  };
  document.querySelectorAll("[data-copy]").forEach((b) => { b.onclick = () => navigator.clipboard.writeText(byId(b.dataset.copy).textContent); });
  document.querySelectorAll("[data-browse]").forEach((b) => {
    b.onclick = () => browse((path) => { byId(b.dataset.browse).value = path; byId(b.dataset.browse).dispatchEvent(new Event("change")); });
  });
  document.querySelectorAll("[data-tab]").forEach((b) => { b.onclick = () => showTab(b.dataset.tab, ""); });
  byId("go").onclick = () => showTab(tab, byId("place").value.trim());
  byId("place").onkeydown = (event) => { if (event.key === "Enter") byId("go").click(); };
  byId("use").onclick = () => use(byId("place").value.trim());
  byId("cancel").onclick = () => byId("browse").close();
}

async function loadRecipe(path) {
  const found = await ask("load", { path });
  if (!found.ok) return byId("status").replaceChildren(problems(found));
  Object.assign(form, { ...found.answer, grouping: "none", scales: {} });
  form.recipe = { base: "", method: "auto", options: {}, ...found.answer.recipe };
  show();
  changed();
}

(async () => {
  const found = await ask("start");
  if (!found.ok) return document.querySelector("main").replaceChildren(problems(found));
  methods = [AUTO, ...found.answer.methods];
  byId("version").textContent = `actmat ${found.answer.version}, in ${found.answer.cwd}`;
  recommended = found.answer.recommended;
  byId("method").replaceChildren(...GROUPS.map((label) => el("optgroup", { label }, ...methods.filter((m) => groupOf(m) === label).map(methodOption))));
  Object.assign(form, JSON.parse(sessionStorage.getItem("form") ?? "{}"));
  if (!form.recipe.experts.length) form.recipe.experts.push({ path: "" }, { path: "" });
  wire();
  show();
  watch();
  plan();
})();
