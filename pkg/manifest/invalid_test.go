package manifest_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/manifest"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// minimal is the shortest valid manifest; tests add to it in line 7.
const minimal = `version: "1"
kind: Task
repository:
  url: owner/repo
claude:
  prompt: Do it.
`

// unmanned lacks an agent, which tests add in line 5.
const unmanned = `version: "1"
kind: Task
repository:
  url: owner/repo
`

// bad is a manifest that Parse refuses.
type bad struct {
	name, text string
	at         string // line:column of the first problem
	says       string // a part of the message
	beyond     bool   // a schema cannot detect it
}

// with returns minimal and one more line, named after the key in that line.
func with(name, line, at, says string) bad {
	return bad{name: name, text: minimal + line + "\n", at: "7:" + at, says: says}
}

// agentOf returns unmanned with an agent on one line.
func agentOf(name, agent, at, says string) bad {
	return bad{name: name, text: unmanned + "agent: " + agent + "\n", at: "5:" + at, says: says}
}

// beyondSchema marks a manifest that only Parse can refuse.
func beyondSchema(b bad) bad {
	b.beyond = true
	return b
}

var bads = []bad{
	// Not a manifest.
	{name: "nothing", text: "", at: "1:1", says: "the manifest is empty"},
	{name: "blank", text: " \n\n", at: "1:1", says: "the manifest is empty"},
	{name: "a comment", text: "# nothing\n", at: "1:1", says: "the manifest is empty"},
	{name: "null", text: "null\n", at: "1:1", says: "the manifest is empty"},
	{name: "a text", text: "do it\n", at: "1:1", says: "the manifest must be an object, got a string"},
	{name: "a number", text: "42\n", at: "1:1", says: "must be an object, got a number"},
	{name: "a list", text: "- version: \"1\"\n", at: "1:1", says: "must be an object, got a list"},
	{name: "an empty object", text: "{}\n", at: "1:1", says: "version is missing"},
	{name: "too large", text: minimal + "# " + strings.Repeat("x", manifest.MaxBytes), at: "1:1", says: "larger than 1 MiB", beyond: true},
	{name: "latin-1", text: "version: \"1\"\nkind: T\xe4sk\n", at: "2:8", says: "not UTF-8"},
	{name: "utf-16", text: "\xff\xfev\x00e\x00r\x00", at: "1:1", says: "not UTF-8"},
	{name: "nul", text: "version: \"1\"\n\x00", at: "2:1", says: "U+0000"},
	{name: "escape", text: "version: \"1\" # \x1b[2J\n", at: "1:16", says: "U+001B"},
	{name: "delete", text: "kind: Task\x7f\n", at: "1:11", says: "U+007F"},
	{name: "C1 control", text: "kind: Täsk\u0085\n", at: "1:11", says: "U+0085"},
	{name: "a byte order mark inside", text: "kind: \ufeffTask\n", at: "1:7", says: "U+FEFF"},

	// Not YAML.
	{name: "unclosed quote", text: "version: \"1\nkind: Task\n", says: "this is not YAML"},
	{name: "unclosed bracket", text: minimal + "secrets: [\n", says: "this is not YAML"},
	{name: "tab for indentation", text: "version: \"1\"\nrepository:\n\turl: x\n", at: "3:1", says: "this is not YAML"},
	{name: "two keys on a line", text: "version: kind: Task\n", says: "this is not YAML"},
	{name: "wrong indentation", text: "version: \"1\"\n  kind: Task\n", says: "this is not YAML"},
	{name: "unknown escape", text: "version: \"\\q\"\n", says: "this is not YAML"},
	{name: "reserved character", text: "version: @1\n", says: "this is not YAML"},
	{name: "JSON cut short", text: `{"version": "1", "kind": "Task"`, says: "this is not YAML"},

	// YAML features that manifests do not allow.
	{name: "two documents", text: minimal + "---\n" + minimal, at: "7:1", says: "a second document", beyond: true},
	{name: "two documents, one empty", text: minimal + "---\n", at: "7:1", says: "a second document", beyond: true},
	{name: "an anchor", text: "version: &v \"1\"\nkind: Task\n", at: "1:10", says: "anchors"},
	{name: "an alias", text: minimal + "metadata: {name: &n x, labels: {a: *n}}\n", at: "7:18", says: "anchors", beyond: true},
	{name: "a star without quotes", text: minimal + "lifecycle:\n  artifact_patterns:\n    - *.patch\n", at: "9:7", says: "begins with * "},
	{name: "a merge key", text: minimal + "metadata:\n  <<: {name: x}\n", at: "8:3", says: "merge keys", beyond: true},
	{name: "a tag", text: "version: !!str 1\n", at: "1:10", says: "tags"},
	{name: "a local tag", text: "version: !env VERSION\n", at: "1:10", says: "tags"},
	{name: "a bomb", text: "a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n", at: "1:4", says: "anchors"},
	{name: "a list for a key", text: "? [a, b]\n: c\n", at: "1:3", says: "this key must be a string"},
	{name: "an object for a key", text: "{a: 1}: b\n", at: "1:1", says: "this key must be a string"},
	{name: "an empty key", text: minimal + ": x\n", at: "7:1", says: "this key must be a string"},
	{name: "nested", text: minimal + "metadata: " + strings.Repeat("[", 30) + strings.Repeat("]", 30) + "\n", at: "7:31", says: "more than 20 levels deep"},
	{name: "nested JSON", text: `{"metadata":` + strings.Repeat("[", 30) + strings.Repeat("]", 30) + "}", at: "1:33", says: "more than 20 levels deep"},
	{name: "nested very deep", text: strings.Repeat("[", 200_000), says: "not YAML"},
	{name: "nested very deep in blocks", text: strings.Repeat("- ", 200_000), says: ""},
	{name: "very many values", text: "[" + strings.Repeat("a,", 20_000) + "a]", says: "more than 10,000 values"},
	{name: "very many values in JSON", text: "[" + strings.Repeat("1,", 20_000) + "1]", says: "more than 10,000 values"},

	// Keys.
	with("unknown key", "promt: x", "1", `the manifest has an unknown key "promt"; known keys are version, kind,`),
	with("unknown key, near one", "secret: []", "1", `did you mean secrets?`),
	with("unknown key of elsewhere", "timeout: 1h", "1", `it belongs in lifecycle`),
	with("unknown key, quite", "zzzzzzzz: 1", "1", `known keys are version, kind,`),
	with("unknown key within", "vm: {cpu: 4}", "6", `vm has an unknown key "cpu"; did you mean cpus?`),
	with("unknown key deep within", "lifecycle: {retries: {clones: 3}}", "23", `did you mean clone?`),
	with("a long unknown key", strings.Repeat("k", 200)+": 1", "1", strings.Repeat("k", 40)+"…"),
	beyondSchema(with("key twice", "kind: Task", "1", `has the key "kind" twice; the first is on line 2`)),
	{name: "key twice in JSON", text: `{"version":"1","kind":"Task","repository":{"url":"a/b","url":"c/d"},"claude":{"prompt":"x"}}`, at: "1:56", says: `"url" twice`, beyond: true},
	beyondSchema(with("label twice", "metadata: {labels: {a: b, a: c}}", "27", `"a" twice`)),
	with("a number for a key", "1: x", "1", `unknown key "1"`),

	// Missing keys.
	{name: "no version", text: "kind: Task\nrepository: {url: a/b}\nclaude: {prompt: x}\n", at: "1:1", says: "version is missing"},
	{name: "no kind", text: "version: \"1\"\nrepository: {url: a/b}\nclaude: {prompt: x}\n", at: "1:1", says: "kind is missing"},
	{name: "no repository", text: "version: \"1\"\nkind: Task\nclaude: {prompt: x}\n", at: "1:1", says: "repository is missing"},
	{name: "no URL", text: "version: \"1\"\nkind: Task\nrepository: {branch: main}\nclaude: {prompt: x}\n", at: "3:13", says: "repository.url is missing"},
	{name: "no agent", text: unmanned, at: "1:1", says: "the manifest has no agent"},
	{name: "no prompt", text: unmanned + "claude: {model: sonnet}\n", at: "5:9", says: "claude.prompt is missing"},
	with("no name of a secret", "secrets: [{source: env, key: X}]", "11", "secrets[0].name is missing"),
	with("no key of a secret", "secrets: [{name: X, source: env}]", "11", "secrets[0].key is missing"),
	with("no source of a secret", "secrets: [{name: X, key: X}]", "11", "secrets[0].source is missing"),

	// Version and kind.
	{name: "version as a number", text: strings.Replace(minimal, `"1"`, "1", 1), at: "1:10", says: "must be a string, got a number; put it in quotes"},
	{name: "another version", text: strings.Replace(minimal, `"1"`, `"2"`, 1), at: "1:10", says: `must be 1, got "2"`},
	{name: "another kind", text: strings.Replace(minimal, "Task", "Pod", 1), at: "2:7", says: `must be Task, got "Pod"`},

	// Metadata.
	with("metadata as a text", "metadata: x", "11", "must be an object, got a string"),
	with("metadata empty", "metadata:", "10", "is empty; add a value or remove the line"),
	with("name as a number", "metadata: {name: 7}", "18", "put it in quotes"),
	with("name as a boolean", "metadata: {name: true}", "18", "must be a string, got a boolean; put it in quotes"),
	with("empty name", `metadata: {name: ""}`, "18", "must be a name"),
	beyondSchema(with("name on two lines", `metadata: {name: "a\nb"}`, "18", "U+000A")),
	beyondSchema(with("name that turns letters", `metadata: {name: "a\u202Eb"}`, "18", "U+202E")),
	with("long name", "metadata: {name: "+strings.Repeat("n", 201)+"}", "18", "must have at most 200 bytes, got 201"),
	with("labels as a list", "metadata: {labels: [a]}", "20", "must be an object, got a list"),
	with("label with a space", "metadata: {labels: {a b: c}}", "21", "must be a label name"),
	with("label that begins with a dash", "metadata: {labels: {-a: b}}", "21", "must be a label name"),
	with("label's value with =", "metadata: {labels: {a: b=c}}", "24", "must be a label value"),
	with("label's value is a number", "metadata: {labels: {a: 1}}", "24", "put it in quotes"),
	with("long label", "metadata: {labels: {"+strings.Repeat("l", 64)+": x}}", "21", "must be a label name"),
	with("many labels", "metadata: {labels: {"+entries(33, "l%d: x")+"}}", "20", "must have at most 32 entries, got 33"),
	with("priority as a text", `metadata: {priority: "5"}`, "22", `must be a whole number in decimal and without quotes, got "5"`),
	with("priority as a fraction", "metadata: {priority: 0.5}", "22", "must be a whole number"),
	beyondSchema(with("priority in octal", "metadata: {priority: 010}", "22", "must be a whole number in decimal")),
	with("priority too high", "metadata: {priority: 101}", "22", "must be from -100 to 100, got 101"),
	with("priority too low", "metadata: {priority: -101}", "22", "must be from -100 to 100"),
	with("priority far too high", "metadata: {priority: 99999999999999999999}", "22", "must be from -100 to 100"),

	// Repository.
	repository("no object", "owner/repo", "13", "must be an object, got a string"),
	repository("empty URL", `{url: ""}`, "19", "must be a repository"),
	repository("option", "{url: --upload-pack=x}", "19", "must be a repository"),
	repository("long URL", "{url: "+strings.Repeat("u", 1025)+"}", "19", "at most 1024 bytes"),
	beyondSchema(repository("password", `{url: "https://me:hunter2@example.org/a/b"}`, "19", "contains a password")),
	beyondSchema(repository("home", "{url: ~/code}", "19", "begins with ~")),
	beyondSchema(repository("invisible", `{url: "a/b\u200b"}`, "19", "U+200B")),
	repository("branch as an option", "{url: a/b, branch: --x}", "32", "must be a branch name"),
	beyondSchema(repository("branch with ..", "{url: a/b, branch: a..b}", "32", "must be a branch name")),
	beyondSchema(repository("branch with a space", "{url: a/b, branch: a b}", "32", "must be a branch name")),
	beyondSchema(repository("branch with a colon", "{url: a/b, branch: 'a:b'}", "32", "must be a branch name")),
	beyondSchema(repository("branch with a shell in it", "{url: a/b, branch: 'a$(id)'}", "32", "must be a branch name")),
	beyondSchema(repository("branch .lock", "{url: a/b, branch: a/b.lock}", "32", "must be a branch name")),
	beyondSchema(repository("branch HEAD", "{url: a/b, branch: HEAD}", "32", "must be a branch name")),
	beyondSchema(repository("whole ref", "{url: a/b, branch: refs/heads/x}", "32", "without refs/heads/")),
	repository("long branch", "{url: a/b, branch: "+strings.Repeat("b", 201)+"}", "32", "at most 200 bytes"),
	repository("commit", "{url: a/b, commit: HEAD~1}", "32", "hexadecimal"),
	repository("short commit", "{url: a/b, commit: abc}", "32", "hexadecimal"),
	repository("commit of digits", "{url: a/b, commit: 1234567}", "32", "put it in quotes"),
	beyondSchema(repository("absolute subpath", "{url: a/b, subpath: /etc}", "33", "begins with /")),
	beyondSchema(repository("subpath out", "{url: a/b, subpath: a/../../b}", "33", "contains ..")),
	beyondSchema(repository("subpath of git", "{url: a/b, subpath: ./.git/hooks}", "33", "git's own")),
	repository("empty subpath", "{url: a/b, subpath: ' '}", "33", "must be a directory"),

	// Agents.
	{name: "two agents", text: minimal + "agent: {kind: codex, prompt: x}\n", at: "6:3", says: "claude cannot be combined with agent"},
	{name: "claude as a text", text: unmanned + "claude: Do it.\n", at: "5:9", says: "must be an object, got a string"},
	{name: "claude empty", text: unmanned + "claude:\n", at: "5:8", says: "is empty"},
	{name: "empty prompt", text: unmanned + "claude: {prompt: ''}\n", at: "5:18", says: "that is not blank"},
	{name: "blank prompt", text: unmanned + "claude: {prompt: \" \\n\\t\"}\n", at: "5:18", says: "that is not blank"},
	{name: "prompt as a list", text: unmanned + "claude: {prompt: [a]}\n", at: "5:18", says: "must be a string, got a list"},
	{name: "long prompt", text: unmanned + "claude: {prompt: " + strings.Repeat("p", 100<<10+1) + "}\n", at: "5:18", says: "must have at most 102400 bytes, got 102401"},
	{name: "long prompt in few letters", text: unmanned + "claude: {prompt: " + strings.Repeat("€", 50<<10) + "}\n", at: "5:18", says: "at most 102400 bytes", beyond: true},
	{name: "prompt with an escape", text: unmanned + "claude: {prompt: \"a\\e[2J\"}\n", at: "5:18", says: "U+001B", beyond: true},
	{name: "prompt with a nul", text: strings.ReplaceAll(`{"version":"1","kind":"Task","repository":{"url":"a/b"},"claude":{"prompt":"a~"}}`, "~", `\u0000`), at: "1:76", says: "U+0000", beyond: true},
	{name: "command of claude", text: unmanned + "claude: {prompt: x, command: [y]}\n", at: "5:21", says: `unknown key "command"`},
	{name: "model as an option", text: unmanned + "claude: {prompt: x, model: --help}\n", at: "5:28", says: "must be a model name"},
	{name: "no turns", text: unmanned + "claude: {prompt: x, max_turns: 0}\n", at: "5:32", says: "must be from 1 to 10000"},
	{name: "tools as a text", text: unmanned + "claude: {prompt: x, allowed_tools: Bash}\n", at: "5:36", says: "write it as [one, another]"},
	{name: "two tools in one", text: unmanned + "claude: {prompt: x, allowed_tools: ['Bash,Edit']}\n", at: "5:37", says: "must be a tool name"},
	{name: "tool as an option", text: unmanned + "claude: {prompt: x, allowed_tools: [--print]}\n", at: "5:37", says: "must be a tool name"},
	{name: "an empty tool", text: unmanned + "claude: {prompt: x, allowed_tools: [~]}\n", at: "5:37", says: "is empty"},
	{name: "many tools", text: unmanned + "claude: {prompt: x, allowed_tools: [" + entries(101, "T%d") + "]}\n", at: "5:36", says: "must have at most 100 entries, got 101"},
	agentOf("no kind", "{prompt: x}", "8", "agent.kind is missing"),
	agentOf("other kind", "{kind: gemini, prompt: x}", "15", `must be claude, codex or command, got "gemini"`),
	agentOf("claude without a prompt", "{kind: claude}", "8", "agent.prompt is missing; an agent of kind claude requires it"),
	agentOf("codex without a prompt", "{kind: codex}", "8", "agent of kind codex requires it"),
	agentOf("command without a command", "{kind: command, prompt: x}", "8", "agent.command is missing"),
	agentOf("turns of codex", "{kind: codex, prompt: x, max_turns: 5}", "44", "agent.max_turns is allowed only for claude"),
	agentOf("tools of codex", "{kind: codex, prompt: x, allowed_tools: []}", "48", "is allowed only for claude"),
	agentOf("command of codex", "{kind: codex, prompt: x, command: [a]}", "42", "is allowed only for command"),
	agentOf("command of claude", "{kind: claude, prompt: x, command: [a]}", "43", "is allowed only for command"),
	agentOf("model of a command", "{kind: command, command: [a], model: b}", "45", "is allowed only for claude and codex"),
	agentOf("command as a text", "{kind: command, command: make all}", "33", "write it as [one, another]"),
	beyondSchema(agentOf("empty command", "{kind: command, command: []}", "33", "must begin with a program")),
	beyondSchema(agentOf("no program", "{kind: command, command: ['', x]}", "33", "must begin with a program")),
	agentOf("number in a command", "{kind: command, command: [sleep, 5]}", "41", "agent.command[1] must be a string, got a number; put it in quotes"),
	agentOf("many arguments", "{kind: command, command: ["+entries(257, "a%d")+"]}", "33", "at most 256 entries"),
	agentOf("env as a list", "{kind: command, command: [a], env: [A=b]}", "43", "must be an object, got a list"),
	agentOf("variable", "{kind: command, command: [a], env: {a-b: c}}", "44", "must be the name of an environment variable"),
	agentOf("value", "{kind: command, command: [a], env: {A: 5}}", "47", "put it in quotes"),
	agentOf("long value", "{kind: command, command: [a], env: {A: "+strings.Repeat("v", 32<<10+1)+"}}", "47", "at most 32768 bytes"),

	// VM.
	with("no CPUs", "vm: {cpus: 0}", "12", "must be from 1 to 1024"),
	with("half a CPU", "vm: {cpus: 0.5}", "12", "must be a whole number"),
	with("CPUs as a text", "vm: {cpus: four}", "12", "must be a whole number"),
	with("memory without a unit", "vm: {memory: 8}", "14", "must have a unit, as in 8G, got \"8\""),
	with("memory as a word", "vm: {memory: much}", "14", "must be a size like"),
	with("memory with a blank", "vm: {memory: 8 G}", "14", "must be a size like"),
	with("negative memory", "vm: {memory: -8G}", "14", "must be a size like"),
	beyondSchema(with("little memory", "vm: {memory: 1M}", "14", "must be from 512M to 64T")),
	beyondSchema(with("much memory", "vm: {memory: 65T}", "14", "must be from 512M to 64T")),
	beyondSchema(with("overflowing memory", "vm: {memory: 9999999999999999T}", "14", "must be a size of at most 1024T")),
	beyondSchema(with("little disk", "vm: {disk: 1K}", "12", "must be from 4G to 1024T")),
	with("network", "vm: {network_mode: everything}", "20", `must be isolated, allowlist, open, outbound or full, got "everything"`),
	with("profile", "vm: {profile: []}", "15", "must be a string, got a list"),
	with("vm as a list", "vm: [big]", "5", "must be an object, got a list"),

	// An existing session.
	forbiddenWithSession("empty", "vm: {session: ''}", "3:15", "must be a session"),
	forbiddenWithSession("as a number", "vm: {session: 123456}", "3:15", "put it in quotes"),
	forbiddenWithSession("as an option", "vm: {session: --force}", "3:15", "must be a session"),
	forbiddenWithSession("of a path", "vm: {session: ./repo}", "3:15", "must be a session"),
	forbiddenWithSession("with a profile", "vm: {profile: p, session: s}", "3:15", "vm.profile cannot be combined with vm.session"),
	forbiddenWithSession("with CPUs", "vm: {session: s, cpus: 2}", "3:24", "vm.cpus cannot be combined with vm.session"),
	forbiddenWithSession("with memory", "vm: {session: s, memory: 8G}", "3:26", "vm.memory cannot be combined with vm.session"),
	forbiddenWithSession("with a disk", "vm: {session: s, disk: 8G}", "3:24", "vm.disk cannot be combined with vm.session"),
	forbiddenWithSession("with a network", "vm: {session: s, network_mode: open}", "3:32", "vm.network_mode cannot be combined with vm.session"),
	forbiddenWithSession("with secrets", "vm: {session: s}\nsecrets: [{name: X, source: env, key: X}]", "4:10", "secrets cannot be combined with vm.session"),
	forbiddenWithSession("with no secrets", "vm: {session: s}\nsecrets: []", "4:10", "secrets cannot be combined with vm.session"),
	forbiddenWithSession("with a branch", "vm: {session: s}\nrepository: {branch: main}", "4:22", "repository.branch cannot be combined with vm.session"),
	forbiddenWithSession("with a commit", "vm: {session: s}\nrepository: {url: a/b, commit: abc123}", "4:32", "repository.commit cannot be combined with vm.session"),
	forbiddenWithSession("that is to be kept", "vm: {session: s}\nlifecycle: {failure_action: preserve}", "4:29", `lifecycle.failure_action is "preserve", which cannot be combined with vm.session`),
	forbiddenWithSession("that is to be kept when it hangs", "vm: {session: s}\nlifecycle: {hang_action: preserve}", "4:26", `lifecycle.hang_action is "preserve", which cannot be combined with vm.session`),
	{name: "a session without its own place", text: minimal + "session: s\n", at: "7:1", says: "it belongs in vm"},

	// Secrets.
	with("secrets as an object", "secrets: {A: b}", "10", "must be a list, got an object"),
	with("secret as a text", "secrets: [A=b]", "11", "must be an object, got a string"),
	with("unknown key of a secret", "secrets: [{nam: A}]", "11", "has an unknown key; known keys are name, source, key"),
	with("small letters", "secrets: [{name: token, source: env, key: X}]", "18", "capital letters"),
	with("pass", "secrets: [{name: X, source: pass, key: a/b}]", "29", "must be env, file, op, cmd, vault, keychain or age"),
	with("empty key of a secret", "secrets: [{name: X, source: env, key: ''}]", "39", "must be a key"),
	with("long key of a secret", "secrets: [{name: X, source: cmd, key: "+strings.Repeat("k", 4097)+"}]", "39", "at most 4096 bytes"),
	beyondSchema(with("no variable", "secrets: [{name: X, source: env, key: a-b}]", "39", "must be the name of an environment variable")),
	beyondSchema(with("relative file", "secrets: [{name: X, source: file, key: a/b}]", "40", "begins with / or ~/")),
	beyondSchema(with("no field", "secrets: [{name: X, source: op, key: op://vault/item}]", "38", "vault/item/field")),
	beyondSchema(with("relative age file", "secrets: [{name: X, source: age, key: a/b}]", "39", "begins with / or ~/")),
	beyondSchema(with("no key in Vault", "secrets: [{name: X, source: vault, key: 'work/github:'}]", "41", "must be path:key")),
	beyondSchema(with("no account", "secrets: [{name: X, source: keychain, key: service}]", "44", "must be service/account")),
	beyondSchema(with("secret twice", "secrets: [{name: X, source: env, key: A}, {name: X, source: env, key: B}]", "50", "is already the name of another secret")),
	beyondSchema(agentOf("secret and variable", "{kind: command, command: [a], env: {X: y}}\nsecrets: [{name: X, source: env, key: X}]", "", "is also set in agent.env")),
	with("many secrets", "secrets: ["+entries(65, "{name: X%d, source: env, key: X}")+"]", "10", "at most 64 entries"),

	// Lifecycle.
	with("duration without a unit", "lifecycle: {timeout: 30}", "22", "must have a unit, as in 30m"),
	with("duration as a word", "lifecycle: {timeout: long}", "22", "must be a duration like"),
	with("duration of another language", "lifecycle: {timeout: 1 hour}", "22", "must be a duration like"),
	with("negative duration", "lifecycle: {timeout: -1h}", "22", "must be a duration like"),
	beyondSchema(with("no time", "lifecycle: {timeout: 0s}", "22", "must be from 1s to 90d")),
	beyondSchema(with("a moment", "lifecycle: {timeout: 1ms}", "22", "must be from 1s to 90d")),
	beyondSchema(with("less than a moment", "lifecycle: {timeout: 1000.5ms}", "22", "whole number of milliseconds")),
	beyondSchema(with("a long time", "lifecycle: {timeout: 91d}", "22", "must be from 1s to 90d")),
	beyondSchema(with("eternity", "lifecycle: {timeout: 999999999d}", "22", "must be a duration of at most 10000d")),
	beyondSchema(with("stage", "lifecycle: {stage_timeout: 25h}", "28", "must be from 1s to 1d")),
	beyondSchema(with("provision", "lifecycle: {provision_timeout: 0s}", "32", "must be from 1s to 1d")),
	with("hang action", "lifecycle: {hang_action: panic}", "26", "must be notify, terminate, restart or preserve"),
	with("failure action", "lifecycle: {failure_action: Preserve}", "29", "must be destroy or preserve"),
	with("no success", "lifecycle: {success_codes: []}", "28", "at least 1 entry"),
	with("success as a number", "lifecycle: {success_codes: 0}", "28", "must be a list, got a number"),
	with("success as a text", "lifecycle: {success_codes: ['0']}", "29", "must be a whole number"),
	with("exit code", "lifecycle: {success_codes: [256]}", "29", "must be from 0 to 255"),
	with("negative exit code", "lifecycle: {success_codes: [-1]}", "29", "must be from 0 to 255"),
	with("absolute pattern", "lifecycle: {artifact_patterns: [/etc/passwd]}", "33", "must be a pattern relative to the checkout"),
	beyondSchema(with("pattern out", "lifecycle: {artifact_patterns: [a/../../b]}", "33", "contains ..")),
	beyondSchema(with("broken pattern", "lifecycle: {artifact_patterns: ['a[']}", "33", "must be a pattern in which")),
	with("many patterns", "lifecycle: {artifact_patterns: ["+entries(101, "p%d")+"]}", "32", "at most 100 entries"),
	beyondSchema(with("no artifacts", "lifecycle: {max_artifact_bytes: 0B}", "33", "must be from 1K to 1T")),
	beyondSchema(with("no grace", "lifecycle: {cancel_grace: 0s}", "27", "must be from 1s to 1h")),
	with("retries", "lifecycle: {retries: {clone: 11}}", "30", "must be from 0 to 10"),
	with("crash loop", "lifecycle: {crash_loop: {restarts: -1}}", "36", "must be from 0 to 100"),
	with("CPU", "lifecycle: {hang: {low_cpu_percent: 101}}", "37", "must be from 0 to 100"),
	beyondSchema(with("lease", "lifecycle: {preserve_for: 1s}", "27", "must be from 1m to 30d")),
}

// repository returns a manifest whose line 3 describes the repository.
func repository(name, repo, at, says string) bad {
	return bad{name: "repository " + name, text: "version: \"1\"\nkind: Task\nrepository: " + repo + "\nclaude: {prompt: x}\n", at: "3:" + at, says: says}
}

// forbiddenWithSession returns a manifest without a repository, with lines from line 3 on.
func forbiddenWithSession(name, lines, at, says string) bad {
	return bad{name: "session " + name, text: "version: \"1\"\nkind: Task\n" + lines + "\nclaude: {prompt: x}\n", at: at, says: says}
}

// entries returns n numbered entries, separated by commas.
func entries(n int, format string) string {
	all := make([]string, n)
	for i := range all {
		all[i] = strings.ReplaceAll(format, "%d", fmt.Sprint(i))
	}
	return strings.Join(all, ", ")
}

func TestBad(t *testing.T) {
	if len(bads) < 120 {
		t.Errorf("bad manifests = %d, want at least 120", len(bads))
	}
	for _, b := range bads {
		t.Run(b.name, func(t *testing.T) {
			task, _, err := manifest.Parse("task.yaml", []byte(b.text), t.TempDir())
			e, ok := errors.AsType[*strictyaml.Error](err)
			if !ok || task != nil {
				t.Fatalf("Parse = %+v, %v, want no task and a *strictyaml.Error", task, err)
			}
			if fail.CodeOf(err) != fail.Usage || fail.HintOf(err) == "" {
				t.Errorf("Parse = %v (code %v, hint %q), want code %v with a hint", err, fail.CodeOf(err), fail.HintOf(err), fail.Usage)
			}
			if len(e.Problems) == 0 || len(e.Problems) > 20 {
				t.Fatalf("problems = %d, want 1 to 20", len(e.Problems))
			}
			if at := fmt.Sprintf("%d:%d", e.Problems[0].Line, e.Problems[0].Column); b.at != "" && !strings.HasSuffix(b.at, ":") && at != b.at {
				t.Errorf("position of the first problem = %s, want %s", at, b.at)
			}
			first, _, _ := strings.Cut(err.Error(), "\n")
			if !strings.HasPrefix(first, fmt.Sprintf("task.yaml:%d:%d: ", e.Problems[0].Line, e.Problems[0].Column)) || !strings.Contains(err.Error(), b.says) {
				t.Errorf("Parse = %v, want %q at %d:%d", err, b.says, e.Problems[0].Line, e.Problems[0].Column)
			}
			if len(err.Error()) > 20*500 {
				t.Errorf("error = %d bytes, want at most %d", len(err.Error()), 20*500)
			}
		})
	}
}
