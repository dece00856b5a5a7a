// The answers with their credit; a part of page.js, with whose names it works.

function makePrompts() {
  const prompts = new Set();
  data.answers.filter((answer) => answer.task === chosen.task).forEach((answer) => prompts.add(answer.prompt));
  const select = byId("prompt-choice");
  select.replaceChildren();
  prompts.forEach((text) => {
    const option = make("option", text.replace(/\s+/g, " ").slice(0, 90));
    option.value = text;
    select.append(option);
  });
  if (!prompts.has(chosen.prompt)) chosen.prompt = prompts.size ? prompts.keys().next().value : null;
}

function drawAnswers() {
  const answers = data.answers.filter((one) => one.task === chosen.task && one.prompt === chosen.prompt && chosen.methods.has(one.method));
  byId("prompt-text").textContent = answers.length ? answers[0].prompt : "";
  byId("prompt-text").style.display = answers.length ? "" : "none";
  const columns = byId("answer-columns");
  columns.replaceChildren();
  const sizes = answers.flatMap((one) => one[chosen.credit].map(Math.abs)).filter((size) => size > 0).sort((a, b) => a - b);
  const full = sizes.length ? sizes[Math.floor(0.95 * (sizes.length - 1))] : 1;
  visibleMethods().forEach(({name}) => {
    const column = make("div", undefined, "column");
    answers.filter((answer) => answer.method === name).forEach((answer) => column.append(answerCard(answer, full)));
    if (column.children.length) columns.append(column);
  });
  if (!answers.length) columns.append(make("p", "No rollouts with credit were recorded for this choice.", "empty"));
}

function answerCard(answer, full) {
  const card = make("div", undefined, "answer");
  const who = make("div", undefined, "who");
  who.append(key(answer.method), make("span", answer.method));
  const reward = answer.reward === null ? "not scored" : `reward ${short(answer.reward)}`;
  card.append(who, make("div", `step ${answer.step} · seed ${answer.seed} · ${reward}`, "what"));
  const text = make("div", undefined, "tokens");
  answer.tokens.forEach((token, index) => {
    const credit = answer[chosen.credit].length ? answer[chosen.credit][index] : 0;
    const piece = make("span", token);
    if (credit) piece.style.background = faded(credit > 0 ? "#0072b2" : "#d55e00", 0.1 + 0.55 * Math.min(Math.abs(credit) / full, 1));
    if (!answer.kept[index]) piece.className = "gone";
    const weight = answer.kl_weights.length ? `, KL weight ${short(answer.kl_weights[index])}` : "";
    piece.title = `advantage ${short(answer.advantages[index])}${weight}${answer.kept[index] ? "" : ", not trained on"}`;
    text.append(piece);
  });
  card.append(text);
  return card;
}
