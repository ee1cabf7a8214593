// SPDX-License-Identifier: Apache-2.0
// Asks this peer once a second and draws what it answers: isthmus.status/1, and the peers of the run.
// What comes from the peer is set as text, never as markup.
"use strict";

const LOOK_MS = 1000;
const ANSWER_MS = 4000;
const OLD_MS = 5000; // figures that stand still for longer are told as such
const WAITS_SHOWN = 120;

const waits = []; // [outer step, seconds] of each committed step since the page was opened
let uptime = -1; // of the newest status, and when that came
let movedAt = performance.now();

const byId = (id) => document.getElementById(id);

function say(id, text) {
  byId(id).textContent = text;
}

function made(name, text, of) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (of !== undefined) element.className = of;
  return element;
}

// ------------------------------------------------------------------------------------ figures in words

const known = (value) => value !== null && value !== undefined;
const fixed = (value, digits, unit = "") => (known(value) ? value.toFixed(digits) + unit : "unknown");
const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en-US") : "unknown");
const share = (value) => (known(value) ? (100 * value).toFixed(1) + " %" : "unknown");
const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

function size(nbytes) {
  const units = ["B", "kB", "MB", "GB"];
  for (const unit of units) {
    if (nbytes < 1000) return `${nbytes.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    nbytes /= 1000;
  }
  return `${nbytes.toFixed(1)} TB`;
}

function duration(seconds) {
  const all = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

// ------------------------------------------------------------------------------------ pictures

function shape(name, attributes, title) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (title !== undefined) {
    const words = document.createElementNS("http://www.w3.org/2000/svg", "title");
    words.textContent = title;
    element.append(words);
  }
  return element;
}

function drawCurve(svg, points) {
  svg.replaceChildren();
  if (points.length < 2) return;
  const values = points.map(([, value]) => value);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const at = ([step, value]) =>
    `${(100 * (step - first)) / Math.max(1, last - first)},${97 - (94 * (value - least)) / (most - least || 1)}`;
  const line = points.map(at).join(" ");
  svg.append(shape("polygon", { class: "area", points: `0,100 ${line} 100,100` }));
  svg.append(shape("polyline", { class: "curve", points: line }));
}

function drawBars(svg, points) {
  svg.replaceChildren();
  const most = Math.max(...points.map(([, value]) => value), 1e-9);
  const width = 100 / Math.max(points.length, 20);
  points.forEach(([step, value], index) => {
    const height = (97 * value) / most;
    const place = { class: "bar", x: index * width, y: 100 - height, width: width * 0.8, height };
    svg.append(shape("rect", place, `outer step ${step}: ${value.toFixed(2)} s`));
  });
}

function list(id, rows) {
  const cells = rows.flatMap(([name, value, mark]) => {
    const term = made("dt");
    if (mark !== undefined) term.append(made("i", undefined, mark));
    term.append(name);
    return [term, made("dd", value)];
  });
  byId(id).replaceChildren(...cells);
}

// ------------------------------------------------------------------------------------ panels

function showHead(status) {
  document.title = `${status.outer_step}/${status.total_outer_steps} ${status.run_id}`;
  say("run", status.run_id);
  say("peer", `${status.phase === "coordinating" ? "coordinator" : "peer"} ${status.peer_id.slice(0, 8)}`);
  say("phase", status.phase);
  byId("progress").max = status.total_outer_steps || 1;
  byId("progress").value = status.outer_step;
  const inner = status.inner_steps_per_round
    ? `, inner step ${status.inner_step} of ${status.inner_steps_per_round}`
    : "";
  const left = known(status.seconds_left) ? `, about ${duration(status.seconds_left)} left` : "";
  say(
    "where",
    `outer step ${status.outer_step} of ${status.total_outer_steps}${inner}, ` +
      `view ${status.epoch} of ${count(status.members.length, "peer")}, up ${duration(status.uptime_s)}${left}`,
  );
}

function showLoss(status) {
  const points = status.losses.filter(([, loss]) => known(loss));
  drawCurve(byId("loss"), points);
  if (points.length) {
    const values = points.map(([, loss]) => loss);
    say("loss-range", `${fixed(Math.max(...values), 4)} at most, ${fixed(Math.min(...values), 4)} at least`);
    say("loss-first", `outer step ${points[0][0]}`);
    say("loss-last", String(points[points.length - 1][0]));
  }
  const rows = [["training", `${fixed(status.train_loss, 4)} nats a token`]];
  rows.push([
    "held out",
    known(status.validation_outer_step)
      ? `${fixed(status.validation_loss, 4)}, ${fixed(status.validation_bits_per_byte, 4)} bits a byte ` +
        `at outer step ${status.validation_outer_step}`
      : "not judged here yet",
  ]);
  rows.push(["tokens", whole(status.tokens)]);
  list("losses", rows);
}

function showRounds(status) {
  const last = status.last_round;
  if (last === null) {
    list("rounds", [["last round", "none yet"]]);
    return;
  }
  if (!waits.length || waits[waits.length - 1][0] !== last.outer_step) {
    waits.push([last.outer_step, last.wait_seconds]);
    if (waits.length > WAITS_SHOWN) waits.shift();
  }
  drawBars(byId("waits"), waits);
  say("waits-most", `${fixed(Math.max(...waits.map(([, seconds]) => seconds)), 2, " s")} at most`);
  say("waits-first", `outer step ${waits[0][0]}`);
  say("waits-last", String(last.outer_step));
  const planned = known(last.predicted_seconds) ? ` (planned ${fixed(last.predicted_seconds, 3, " s")})` : "";
  list("rounds", [
    ["last round", `${fixed(last.seconds, 2, " s")} with ${count(last.num_members, "peer")}`],
    ["waited", fixed(last.wait_seconds, 2, " s")],
    ["exchange", `${fixed(last.exchange_seconds, 3, " s")}${planned}, ${size(last.bytes)}`],
    ["goodput", share(status.goodput)],
  ]);
}

function pathTo(member) {
  if (member.is_me) return "";
  if (member.is_apart) return "no link, through other members";
  return member.host ? `${member.is_dialled ? "to" : "from"} ${member.host}` : member.address;
}

function showPeers(status, peers) {
  const others = new Map(peers.map((peer) => [peer.peer_id, peer]));
  const rows = status.members.map((member) => {
    const state = [others.get(member.peer_id)?.state ?? "member"];
    others.delete(member.peer_id);
    if (member.is_me) state.push("this");
    if (member.is_coordinator) state.push("coordinator");
    const trip = known(member.round_trip_ms) ? `${member.round_trip_ms.toFixed(1)} ms` : "";
    return [member.peer_id.slice(0, 8), state.join(", "), pathTo(member), trip];
  });
  for (const peer of others.values()) rows.push([peer.peer_id.slice(0, 8), peer.state, peer.address ?? "", ""]);
  const lines = rows.map((cells) => {
    const line = made("tr");
    line.append(...cells.map((cell) => made("td", cell)));
    return line;
  });
  byId("peers").replaceChildren(...lines);
}

function showTraffic(status) {
  const rows = [
    ["sent", size(status.sent_bytes)],
    ["received", size(status.received_bytes)],
  ];
  const now = status.coordination;
  if (now !== null) {
    const here = `${now.voted.length} of ${count(now.num_members, "vote")}`;
    rows.push([`round ${now.outer_step + 1}`, `${here}, ${count(now.num_learners, "learner")}, ${now.num_late} late`]);
  }
  if (known(status.checkpoint_outer_step)) rows.push(["checkpoint", `at outer step ${status.checkpoint_outer_step}`]);
  if (status.leaving !== null) rows.push(["leaving", `waits for: ${status.leaving.reason ?? status.leaving.waits_for}`]);
  list("traffic", rows);
}

function showPace(status) {
  const rows = [["tokens a second", whole(status.tokens_per_s)]];
  const step = status.step;
  const bar = byId("parts");
  bar.replaceChildren();
  if (step !== null) {
    const parts = [
      ["passes", step.passes_seconds],
      ["clipping", step.clip_seconds],
      ["update", step.update_seconds],
      ["text", step.data_seconds],
    ];
    const told = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
    parts.push(["rest", Math.max(0, step.seconds - told)]);
    rows.push(["last inner step", `${fixed(step.seconds, 3, " s")}, ${whole(step.tokens_per_s)} tokens a second`]);
    if (known(step.mfu)) rows.push(["of the devices' peak", share(step.mfu)]);
    parts.forEach(([name, seconds], index) => {
      const piece = made("div", undefined, `part-${index}`);
      piece.style.width = `${(100 * seconds) / step.seconds}%`;
      piece.title = `${name} ${seconds.toFixed(3)} s`;
      bar.append(piece);
      rows.push([name, share(seconds / step.seconds), `part-${index}`]);
    });
  }
  list("pace", rows);
}

// ------------------------------------------------------------------------------------ asking

function tell(sentence) {
  const notice = byId("notice");
  notice.hidden = !sentence;
  if (notice.textContent !== sentence) notice.textContent = sentence;
}

async function ask(name) {
  const answer = await fetch(name, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.json();
}

async function look() {
  try {
    const [status, peers] = await Promise.all([ask("status.json"), ask("peers.json")]);
    if (status.uptime_s !== uptime) [uptime, movedAt] = [status.uptime_s, performance.now()];
    showHead(status);
    showLoss(status);
    showRounds(status);
    showPeers(status, peers);
    showTraffic(status);
    showPace(status);
    const age = performance.now() - movedAt;
    tell(age > OLD_MS ? `the peer has told nothing new for ${duration(age / 1000)}` : "");
  } catch (error) {
    tell(`the peer does not answer (${error.message}); isthmus status on its machine says whether it has ended`);
  }
  setTimeout(look, LOOK_MS);
}

look();
