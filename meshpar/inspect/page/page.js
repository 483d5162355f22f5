// The interactive parts of a report: mesh and shards, timeline, and filters of tables.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const MAX_DEVICES = 1024; // devices that are drawn
const MAX_CELLS = 64; // shards that are drawn along a dim
const LANES = ["compute", "communication"];
const LANE_PX = 44, HEAD_PX = 22, MIN_LABEL_PX = 40;

function element(parent, tag, attributes = {}, text = "") {
  const isSvg = tag === "svg" || parent.namespaceURI === SVG;
  const node = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return parent.appendChild(node);
}

function select(parent, label, options) {
  const node = element(element(parent, "label", {}, label + " "), "select", { "aria-label": label });
  for (const [value, text] of options) element(node, "option", { value }, text);
  return node;
}

function captioned(parent, caption) {
  const node = element(parent, "figure");
  element(node, "figcaption", {}, caption);
  return node;
}

const product = numbers => numbers.reduce((total, number) => total * number, 1);
const color = (index, count) => `hsl(${Math.round((360 * index) / Math.max(count, 1))} 55% 62%)`;

function humanBytes(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(bytes, 1)) / 3)));
  return `${+(bytes / 1000 ** power).toPrecision(3)} ${units[power]}`;
}

function humanTime(seconds) {
  const [factor, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${+(seconds * factor).toPrecision(4)} ${unit}`;
}

// ---- Mesh and shards ----------------------------------------------------------------------------------------------

// Coordinates of device `index` on the mesh, by axis. The last axis varies fastest.
function coordinates(index, sizes) {
  const result = {};
  for (const axis of Object.keys(sizes).reverse()) {
    result[axis] = index % sizes[axis];
    index = Math.floor(index / sizes[axis]);
  }
  return result;
}

// Index of the shard along each dim that a device has. Of the axes of a dim, the first varies slowest.
function shardOf(device, spec, sizes) {
  return spec.map(axes => axes.reduce((index, axis) => index * sizes[axis] + device[axis], 0));
}

function meshView(root, data) {
  const { mesh, tensors } = data;
  const choice = select(root, "tensor", tensors.map((tensor, i) => [i, `${tensor.group}: ${tensor.path}`]));
  const info = element(root, "p", { class: "info" });
  const views = element(root, "div", { class: "views" });
  const note = element(root, "p", { class: "faint hover" }, "Point at a device or at a shard.");

  function draw() {
    const tensor = tensors[choice.value];
    const used = new Set(tensor.spec.flat());
    const numDevices = product(Object.values(mesh));
    // Of a large mesh, only the axes over which the tensor is sharded are drawn.
    const isCut = numDevices > MAX_DEVICES;
    const sizes = Object.fromEntries(Object.entries(mesh).filter(([axis]) => !isCut || used.has(axis)));
    const replicas = Object.entries(mesh).filter(([axis, size]) => size > 1 && !used.has(axis));
    const counts = tensor.spec.map(axes => product(axes.map(axis => mesh[axis])));
    const numShards = product(counts);
    const dims = tensor.shape.map((size, i) => {
      const name = tensor.names && tensor.names[i] ? `${tensor.names[i]}=` : "";
      return name + size.toLocaleString("en") + (counts[i] > 1 ? ` / ${tensor.spec[i].join("*")} ${counts[i]}` : "");
    });
    info.textContent =
      `${tensor.dtype}[${dims.join(", ")}], ${humanBytes(tensor.bytes)} per device, ${numShards} shard` +
      (numShards === 1 ? "" : "s") +
      (replicas.length ? `, replicated over ${replicas.map(([axis, size]) => `${axis}=${size}`).join(", ")}` : "");
    views.replaceChildren();

    // The tensor: a rectangle of its two dims with the most shards. Remaining dims are not drawn.
    const order = counts.map((_, dim) => dim).sort((a, b) => counts[b] - counts[a] || a - b).slice(0, 2).sort();
    const [rowDim, columnDim] = order.length > 1 ? order : [undefined, order[0]];
    const rows = Math.min(counts[rowDim] || 1, MAX_CELLS), columns = Math.min(counts[columnDim] || 1, MAX_CELLS);
    const [width, height] = [280, 180];
    const shards = element(captioned(views, "shards of the tensor"), "svg", { class: "shards", width: width + 2, height: height + 2 });
    const cells = new Map();
    for (let row = 0; row < rows; row++)
      for (let column = 0; column < columns; column++) {
        const key = `${row},${column}`;
        const cell = element(shards, "rect", {
          x: 1 + (column * width) / columns, y: 1 + (row * height) / rows, width: width / columns,
          height: height / rows, fill: color(row * columns + column, rows * columns), "data-shard": key,
        });
        cells.set(key, cell);
      }

    const devices = element(captioned(views, "devices"), "svg", { class: "devices" });
    const drawn = Math.min(product(Object.values(sizes)), MAX_DEVICES);
    const lastSize = Math.max(1, ...Object.values(sizes).filter(size => size > 1).slice(-1));
    const perRow = Math.min(Math.max(lastSize, Math.ceil(Math.sqrt(drawn) / lastSize) * lastSize), 64);
    const side = Math.max(8, Math.min(34, Math.floor(420 / perRow)));
    devices.setAttribute("width", perRow * side + 2);
    devices.setAttribute("height", Math.ceil(drawn / perRow) * side + 2);
    const holders = new Map();
    for (let index = 0; index < drawn; index++) {
      const device = coordinates(index, sizes);
      const shard = shardOf({ ...Object.fromEntries(Object.keys(mesh).map(axis => [axis, 0])), ...device }, tensor.spec, mesh);
      const [row, column] = [shard[rowDim] || 0, shard[columnDim] || 0];
      const key = `${row % rows},${column % columns}`;
      const square = element(devices, "rect", {
        x: 1 + (index % perRow) * side, y: 1 + Math.floor(index / perRow) * side, width: side - 1, height: side - 1,
        fill: cells.get(key).getAttribute("fill"), "data-device": index,
      });
      square.meshpar = { device, shard, key };
      holders.set(key, [...(holders.get(key) || []), square]);
    }
    if (isCut) element(views, "p", { class: "faint" },
      `${numDevices.toLocaleString("en")} devices: one per shard is drawn` + (drawn < numShards ? `, the first ${drawn}.` : "."));

    function highlight(key, text) {
      for (const node of views.querySelectorAll(".on")) node.classList.remove("on");
      for (const node of [cells.get(key), ...(holders.get(key) || [])]) node.classList.add("on");
      note.textContent = text;
    }
    devices.onpointerover = event => {
      if (!event.target.meshpar) return;
      const { device, shard, key } = event.target.meshpar;
      const slices = tensor.shape.map((size, dim) => {
        const length = Math.ceil(size / counts[dim]);
        return `${shard[dim] * length}:${Math.min(size, (shard[dim] + 1) * length)}`;
      });
      const where = Object.entries(device).filter(([axis]) => mesh[axis] > 1).map(([axis, at]) => `${axis}=${at}`);
      highlight(key, `device ${where.join(", ") || 0} has [${slices.join(", ")}]`);
    };
    shards.onpointerover = event => {
      const key = event.target.dataset.shard;
      if (key) highlight(key, `this shard is on ${(holders.get(key) || []).length} of the drawn devices`);
    };
  }
  choice.onchange = draw;
  if (tensors.length) draw();
}

// ---- Timeline -----------------------------------------------------------------------------------------------------

function timelineView(root, data) {
  const { segments, strings } = data;
  const title = segment =>
    (segment.name ? `loop ${strings[segment.module] || segment.name}` : "step, loops folded") +
    (segment.backward ? ", backward" : "") + (segment.trips > 1 ? `, ${segment.trips} iterations of` : ":") + ` ${humanTime(segment.duration_s)}`;
  const bar = element(root, "p");
  const choice = select(bar, "part", segments.map((segment, i) => [i, title(segment)]));
  const reset = element(bar, "button", { type: "button" }, "show all");
  const canvas = element(root, "canvas", { class: "timeline", tabindex: 0 });
  const note = element(root, "p", { class: "faint hover" },
    "Scroll to zoom, drag to move, point at an op for its name. A double click on a loop shows an iteration.");
  const height = HEAD_PX + LANES.length * LANE_PX;
  let view = [0, 1], segment = segments[0], drag = null;

  const fill = { matmul: "#4a5c6d", kernel: "#aebac5", loop: "#d9c27a", communication: "#d1495b" };
  const colorOf = op => (op[2] ? fill.communication : fill[strings[op[3]]] || fill.kernel);

  function draw() {
    const width = (canvas.width = canvas.clientWidth || 900);
    canvas.height = height;
    canvas.dataset.view = view.map(time => time.toPrecision(6)).join(" ");
    const context = canvas.getContext("2d");
    const scale = width / (view[1] - view[0]);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const ink = getComputedStyle(canvas).color;
    context.fillStyle = ink;
    const tick = 10 ** Math.floor(Math.log10((view[1] - view[0]) / 4));
    const every = [1, 2, 5, 10].map(n => n * tick).find(step => (view[1] - view[0]) / step <= 8);
    for (let time = Math.ceil(view[0] / every) * every; time < view[1]; time += every) {
      context.fillRect((time - view[0]) * scale, HEAD_PX - 5, 1, 5);
      context.fillText(humanTime(Math.max(time, 0)), (time - view[0]) * scale + 3, HEAD_PX / 2);
    }
    for (const op of segment.ops) {
      if (op[1] < view[0] || op[0] > view[1]) continue;
      const x = Math.max(0, (op[0] - view[0]) * scale), end = Math.min(width, (op[1] - view[0]) * scale);
      const y = HEAD_PX + op[2] * LANE_PX + 4;
      context.fillStyle = colorOf(op);
      context.fillRect(x, y, Math.max(end - x, 0.6), LANE_PX - 8);
      if (end - x < MIN_LABEL_PX) continue;
      context.save();
      context.beginPath();
      context.rect(x, y, end - x - 2, LANE_PX - 8);
      context.clip();
      context.fillStyle = strings[op[3]] === "matmul" || op[2] ? "#fff" : "#22303c";
      context.fillText(strings[op[5]] || strings[op[3]], x + 4, y + (LANE_PX - 8) / 2);
      context.restore();
    }
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const time = view[0] + ((event.clientX - box.left) / (box.width || 1)) * (view[1] - view[0]);
    const lane = Math.floor((event.clientY - box.top - HEAD_PX) / LANE_PX);
    const op = segment.ops.find(op => op[2] === lane && op[0] <= time && time <= op[1]);
    return { time, op };
  }
  function show(start, end) {
    const span = Math.min(Math.max(end - start, segment.duration_s * 1e-5), segment.duration_s);
    start = Math.min(Math.max(start, 0), segment.duration_s - span);
    view = [start, start + span];
    draw();
  }
  function open(index) {
    choice.value = index;
    segment = segments[index];
    show(0, segment.duration_s);
  }
  choice.onchange = () => open(+choice.value);
  reset.onclick = () => show(0, segment.duration_s);
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    const { time } = at(event), factor = event.deltaY > 0 ? 1.25 : 0.8;
    show(time - (time - view[0]) * factor, time + (view[1] - time) * factor);
  }, { passive: false });
  canvas.onpointerdown = event => { drag = { x: event.clientX, view }; };
  canvas.onpointerup = canvas.onpointerleave = () => { drag = null; };
  canvas.onpointermove = event => {
    if (drag) {
      const shift = ((drag.x - event.clientX) / (canvas.clientWidth || 1)) * (drag.view[1] - drag.view[0]);
      show(drag.view[0] + shift, drag.view[1] + shift);
      return;
    }
    const { op } = at(event);
    if (op) note.textContent = [
      humanTime(op[1] - op[0]), strings[op[3]], strings[op[4]] && `over ${strings[op[4]]}`, strings[op[5]], strings[op[6]],
    ].filter(Boolean).join(" · ");
  };
  canvas.ondblclick = event => {
    const { op } = at(event);
    const index = op ? segments.findIndex(one => one.name && one.name === strings[op[6]]) : -1;
    if (index > 0) open(index);
  };
  canvas.onkeydown = event => {
    const span = view[1] - view[0];
    const change = { "+": [0.1, -0.1], "-": [-0.125, 0.125], ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2] }[event.key];
    if (change) show(view[0] + change[0] * span, view[1] + change[1] * span);
  };
  new ResizeObserver(draw).observe(canvas);
  open(0);
}

// ---- Tables -------------------------------------------------------------------------------------------------------

const PREFIXES = { E: 1e18, P: 1e15, T: 1e12, G: 1e9, M: 1e6, k: 1e3, "": 1, m: 1e-3, µ: 1e-6, n: 1e-9, p: 1e-12 };

// The number of a cell such as `1.2 ms`, `< 1%` or `3,400`, to sort by; NaN for text.
function numberOf(text) {
  const match = /^[<−-]?\s*([\d.,]+)\s*(?:([EPTGMkmµnp]?)(?:B|s|FLOP)|%|\+)?$/.exec(text.trim());
  return match ? parseFloat(match[1].replaceAll(",", "")) * PREFIXES[match[2] || ""] : NaN;
}

// Add filters to a table: a text, and a choice for each column with few different values. Headings sort.
function filterTable(table, folded) {
  const body = table.tBodies[0], headings = [...table.tHead.rows[0].cells];
  if (folded) {
    body.append(...folded.querySelectorAll("tbody tr"));
    folded.remove();
  }
  const rows = [...body.rows];
  const bar = document.createElement("p");
  bar.className = "filters";
  table.closest(".scroll").before(bar);
  const text = element(bar, "input", { type: "search", placeholder: "filter", "aria-label": "filter rows" });
  const count = element(bar, "span", { class: "faint" });
  const choices = headings.map((heading, column) => {
    const values = [...new Set(rows.map(row => row.cells[column].textContent))];
    if (heading.className === "n" || values.length < 2 || values.length > 12 || values.some(value => value.length > 40)) return null;
    const node = select(bar, heading.textContent, [["", "all"], ...values.sort().map(value => [value, value || "–"])]);
    return node;
  });
  function apply() {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const content = row.textContent.toLowerCase();
      row.hidden = !words.every(word => content.includes(word)) ||
        choices.some((node, column) => node && node.selectedIndex && row.cells[column].textContent !== node.value);
      shown += !row.hidden;
    }
    count.textContent = ` ${shown} of ${rows.length} rows `;
  }
  bar.oninput = apply;
  headings.forEach((heading, column) => {
    let direction = 1;
    heading.onclick = () => {
      const key = row => row.cells[column].textContent;
      direction = -direction;
      const sorted = [...rows].sort((a, b) => {
        const [x, y] = [numberOf(key(a)), numberOf(key(b))];
        return direction * (isNaN(x) || isNaN(y) ? key(a).localeCompare(key(b)) : x - y);
      });
      body.append(...sorted);
    };
    heading.classList.add("sorts");
  });
  apply();
}

// ---- Start --------------------------------------------------------------------------------------------------------

for (const root of document.querySelectorAll(".meshpar[data-report]")) {
  const data = JSON.parse(document.getElementById("data-" + root.dataset.report).textContent);
  const views = { mesh: meshView, timeline: timelineView };
  for (const [name, view] of Object.entries(views)) {
    const node = root.querySelector(`[data-view="${name}"]`);
    if (node) view(node, data);
  }
  for (const table of root.querySelectorAll("table")) {
    const next = table.closest(".scroll").nextElementSibling;
    const folded = next && next.tagName === "DETAILS" ? next : null;
    if (!table.closest("details") && (folded || table.tBodies[0].rows.length > 8)) filterTable(table, folded);
  }
}
