// Package manifest defines what a user asks of a task: which repository, which agent
// with which prompt, in what kind of VM, for how long, and which results are kept. It
// reads manifests (YAML or JSON) strictly, fills in defaults, and reports problems with
// their position and how to fix them.
//
// It never looks at the host: the packages that use a profile, a branch or a secret
// check that it exists. The author of a manifest may be hostile: time and memory are
// bounded by MaxBytes.
//
// The tags of the types are the only description of the format. Parse reads by them,
// Schema publishes them:
//
//	json      the key
//	doc       its description, for people
//	default   its value when it is left out
//	required  it cannot be left out; with own, it can beside vm.session
//	enum      the allowed words, separated by |
//	else      advice for users who need another word
//	min, max  bounds: of a number, a size or a duration itself, or of the
//	          number of entries of a list or a map
//	like      the name of a rule for a text, or for every text of a list or map
//	keys      the name of a rule for the keys of a map
//	quiet     no error repeats the value, because it could be a credential
//	own       only for a task with its own session, not beside vm.session: the
//	          whole key if this is *, otherwise this word
package manifest

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/measure"
)

// MaxBytes is the maximum size of a manifest.
const MaxBytes = 1 << 20

// Task is a manifest with all defaults filled in and `claude:` converted to Agent.
type Task struct {
	Version    string     `json:"version" required:"true" enum:"1" doc:"The version of the manifest format."`
	Kind       string     `json:"kind" required:"true" enum:"Task" doc:"What the manifest describes."`
	Metadata   Metadata   `json:"metadata" doc:"The task's name, labels and priority."`
	Repository Repository `json:"repository,omitzero" required:"own" doc:"The repository that the agent works on."`
	Agent      Agent      `json:"agent" doc:"The agent and its work. Either this or claude."`
	VM         VM         `json:"vm" doc:"The task's own VM, or the existing session that it runs in."`
	Secrets    []Secret   `json:"secrets,omitempty" max:"64" quiet:"true" own:"*" doc:"Environment variables of the agent, given as references. Their values are resolved while the VM boots, and are never written to a disk."`
	Budget     Budget     `json:"budget,omitzero" own:"*" doc:"What the task may use of models, in addition to the configured budget: the lower limit counts."`
	Placement  Placement  `json:"placement,omitzero" own:"*" doc:"Which hosts of a cluster may run the task. It has no effect on a host that belongs to none."`
	Subtasks   Subtasks   `json:"subtasks" doc:"What the agent may submit as subtasks, within the configured limits. It has no effect beside vm.session."`
	Lifecycle  Lifecycle  `json:"lifecycle" doc:"Time limits, reactions to failures, and files to collect."`

	source *source // nil if the task was not parsed
}

// Metadata identifies the task for people and sets its priority.
type Metadata struct {
	Name     string            `json:"name,omitempty" like:"name" doc:"A name to recognize the task by. It need not be unique, because ids are generated."`
	Labels   map[string]string `json:"labels,omitempty" max:"32" keys:"label" like:"label value" doc:"Labels to find tasks by. Without a priority, a label priority of high, normal or low sets it to 50, 0 or -50."`
	Priority int               `json:"priority" default:"0" min:"-100" max:"100" doc:"Waiting tasks with a higher priority start first."`
}

// Repository describes what the agent works on.
type Repository struct {
	URL     string `json:"url,omitempty" required:"own" like:"url" doc:"A repository that open accepts: owner/repo on github.com, a git URL, or a path. Paths that begin with . are relative to the manifest's directory."`
	Branch  string `json:"branch,omitempty" own:"*" like:"branch" doc:"The branch to start from; the default branch when omitted."`
	Commit  string `json:"commit,omitempty" own:"*" like:"commit" doc:"The commit to start from, as a full or abbreviated hash; the branch's last commit when omitted."`
	Subpath string `json:"subpath,omitempty" like:"subpath" doc:"The directory of the repository in which the agent starts; its root when omitted."`
}

// Kind is a kind of agent.
type Kind string

// The kinds of agents.
const (
	Claude  Kind = "claude"  // Claude Code
	Codex   Kind = "codex"   // Codex
	Command Kind = "command" // any program
)

// Agent describes the agent and its work.
type Agent struct {
	Kind         Kind              `json:"kind" required:"true" enum:"claude|codex|command" doc:"claude is Claude Code, codex is Codex, command is any program."`
	Prompt       string            `json:"prompt,omitempty" like:"prompt" doc:"The agent's instructions; claude and codex require them. They are one argument, so they are limited to 100 KiB."`
	Model        string            `json:"model,omitempty" like:"model" doc:"The model; the agent's own choice when omitted. Not for command."`
	MaxTurns     int               `json:"max_turns,omitempty" min:"1" max:"10000" doc:"The number of turns after which claude stops; 100 when omitted. Only for claude."`
	AllowedTools []string          `json:"allowed_tools,omitempty" max:"100" like:"tool" doc:"The tools that claude has; all when omitted. Only for claude."`
	Permissions  Permissions       `json:"permissions,omitempty" enum:"bypass|ask" doc:"bypass: the agent may use every tool, as when omitted. ask: it asks for permissions, which wait for an answer. Only for claude and codex."`
	Command      []string          `json:"command,omitempty" max:"256" like:"argument" doc:"Program and arguments; no shell runs unless you name one. Only for command, which requires it. The program finds the prompt in TASK.md."`
	Env          map[string]string `json:"env,omitempty" max:"64" keys:"variable" like:"value" quiet:"true" doc:"Environment variables of the agent. Credentials belong in secrets."`
}

// claude is the short form of an Agent of that kind.
type claude struct {
	Prompt       string   `json:"prompt" required:"true" like:"prompt" doc:"The agent's instructions. They are one argument, so they are limited to 100 KiB."`
	Model        string   `json:"model,omitempty" like:"model" doc:"The model; the agent's own choice when omitted."`
	MaxTurns     int      `json:"max_turns" default:"100" min:"1" max:"10000" doc:"The number of turns after which the agent stops."`
	AllowedTools []string `json:"allowed_tools,omitempty" max:"100" like:"tool" doc:"The tools that the agent has; all when omitted."`

	Permissions Permissions `json:"permissions,omitempty" enum:"bypass|ask" doc:"bypass: the agent may use every tool, as when omitted. ask: it asks for permissions, which wait for an answer."`
}

// Permissions says whether an agent asks before it uses a tool. The zero value means bypass.
type Permissions string

// AskPermissions makes the agent ask.
const AskPermissions Permissions = "ask"

// defaultTurns is the default of max_turns.
const defaultTurns = 100

// VM describes the VM that a task gets for itself, or the session that it runs in.
// CPUs, Memory and Disk are 0 if the profile or the session defines them.
type VM struct {
	Session     string       `json:"session,omitempty" like:"session" doc:"An existing session, by its name, its id or the start of its id. The task runs in it and leaves it unchanged except for the agent's work."`
	Profile     string       `json:"profile,omitempty" own:"*" like:"word" doc:"A profile of the settings. Its resources are the defaults here."`
	CPUs        int          `json:"cpus,omitempty" own:"*" min:"1" max:"1024" doc:"The number of CPUs; 4 without a profile."`
	Memory      measure.Size `json:"memory,omitempty" own:"*" min:"512M" max:"64T" doc:"The size of the memory; 8G without a profile."`
	Disk        measure.Size `json:"disk,omitempty" own:"*" min:"4G" max:"1024T" doc:"The size of the disk; 40G without a profile."`
	NetworkMode string       `json:"network_mode,omitempty" own:"*" enum:"isolated|allowlist|open|outbound|full" doc:"isolated: no network. allowlist: only the configured names. open: the internet, but not the local network; outbound and full are synonyms of open. As configured when omitted."`
	Workspace   string       `json:"workspace,omitempty" own:"*" like:"word" doc:"A workspace of the host, which holds the checkout. No other session may have it."`
	HTTP        []Requests   `json:"http,omitempty" own:"*" max:"64" doc:"Rules for HTTP requests, in addition to the configured ones. They only narrow."`
}

// Budget limits what a task uses of models.
type Budget struct {
	Session string `json:"session,omitempty" like:"amount" doc:"The money, at the prices of prices.yaml, such as 5 USD."`
	Tokens  int    `json:"tokens,omitempty" min:"1" max:"999999999" doc:"The number of tokens, read and written."`
}

// Subtasks limits the tasks that the agent may submit from its VM.
type Subtasks struct {
	Count   int    `json:"count" default:"1000" min:"0" max:"1000" doc:"How many subtasks the task may have over its whole run, with theirs."`
	Depth   int    `json:"depth" default:"1000" min:"0" max:"1000" doc:"How many levels of subtasks there may be below the task."`
	Running int    `json:"running" default:"1000" min:"0" max:"1000" doc:"How many of its own subtasks may run at the same time."`
	Orphans string `json:"orphans" default:"cancel" enum:"cancel|keep" doc:"What happens to subtasks that have not ended when the task ends. cancel: they are cancelled and their results collected. keep: they continue."`
}

// KeepOrphans is the value of Orphans that lets subtasks continue.
const KeepOrphans = "keep"

// Placement limits the hosts of a cluster that may run a task.
type Placement struct {
	Host   string            `json:"host,omitempty" like:"word" doc:"The name of the only host that may run the task."`
	Arch   string            `json:"arch,omitempty" enum:"amd64|arm64" doc:"The architecture of the host; any when omitted."`
	Labels map[string]string `json:"labels,omitempty" max:"32" keys:"label" like:"label value" doc:"Labels that the host must have, as its settings define them."`
}

// Requests are the rules for HTTP requests to a host.
type Requests struct {
	Host  string   `json:"host" required:"true" like:"host" doc:"The host, or *.ZONE."`
	Allow []string `json:"allow,omitempty" max:"256" like:"request rule" doc:"The only requests that the host may receive, such as GET,POST /v1/**."`
	Deny  []string `json:"deny,omitempty" max:"256" like:"request rule" doc:"Requests that the host may not receive, even if allowed."`
}

// Defaults for a VM without a profile.
const (
	defaultCPUs   = 4
	defaultMemory = 8 << 30
	defaultDisk   = 40 << 30
)

// Network returns the network mode in the terms of package policy; "" means as
// configured.
func (v VM) Network() string {
	switch v.NetworkMode {
	case "outbound", "full":
		return "open"
	}
	return v.NetworkMode
}

// Secret is one environment variable whose value comes from another source.
type Secret struct {
	Name   string `json:"name" required:"true" like:"secret name" doc:"The environment variable that the agent receives."`
	Source string `json:"source" required:"true" enum:"env|file|op|cmd|vault|keychain|age" else:"for other sources, use cmd with a command that prints the value" doc:"Where the value comes from on the host: an environment variable, a file, 1Password, the output of a command, HashiCorp Vault, the keychain, or a file that age encrypted."`
	Key    string `json:"key" required:"true" like:"key" doc:"Which value: the variable's name, the file's path, vault/item/field, the command, path:key, or service/account."`
	// Where the value may go, as in the settings. Without any of these, the settings' bindings
	// say it.
	To    []string `json:"to,omitempty" max:"64" like:"host" doc:"The hosts to which the value may be sent. The agent has a placeholder."`
	Body  bool     `json:"body,omitempty" doc:"Whether the placeholder is also replaced in the bodies of requests."`
	Guest bool     `json:"guest,omitempty" doc:"The agent has the value itself, and can send it anywhere."`
	Like  string   `json:"like,omitempty" like:"prefix" doc:"What the placeholder begins with."`
}

// Ref returns the secret's reference in the form that the configuration uses and
// package secret reads, such as env:NAME or op://vault/item/field.
func (s Secret) Ref() string {
	if s.Source == "op" {
		return "op://" + strings.TrimPrefix(s.Key, "op://")
	}
	return s.Source + ":" + s.Key
}

// Lifecycle defines how long things may take, what happens when they fail, and what is
// kept.
type Lifecycle struct {
	Timeout          measure.Duration `json:"timeout" default:"24h" min:"1s" max:"90d" doc:"The limit for the whole run of the agent."`
	StageTimeout     measure.Duration `json:"stage_timeout" default:"15m" min:"1s" max:"1d" doc:"The limit for fetching the repository."`
	ProvisionTimeout measure.Duration `json:"provision_timeout" default:"10m" min:"1s" max:"1d" doc:"The limit for creating the VM and running the setup of the repository."`
	HangTimeout      measure.Duration `json:"hang_timeout" default:"30m" min:"1s" max:"90d" doc:"An agent without output for this long counts as hung."`
	HangAction       string           `json:"hang_action" default:"terminate" enum:"notify|terminate|restart|preserve" own:"preserve" doc:"What happens to a hung agent. notify: only an event. terminate: it is stopped and the task fails. restart: it is started again. preserve: the task fails and the VM is kept."`
	FailureAction    string           `json:"failure_action" default:"destroy" enum:"destroy|preserve" own:"preserve" doc:"What happens to the VM of a failed task."`
	PreserveFor      measure.Duration `json:"preserve_for" default:"2h" min:"1m" max:"30d" doc:"How long the VM is then kept."`
	SuccessCodes     []int            `json:"success_codes" default:"0" min:"1" max:"64" doc:"The agent's exit codes that mean success."`
	Rerun            string           `json:"rerun" default:"if-not-started" enum:"never|if-not-started|always" doc:"Whether another host of a cluster runs the task after its host was lost. if-not-started: only if the agent certainly did not run. always: even if the agent may have run, and pushed, before."`
	ArtifactPatterns []string         `json:"artifact_patterns,omitempty" max:"100" like:"pattern" doc:"Files of the checkout to collect in addition to the changes. * and ? do not match a /, ** does."`
	MaxArtifactBytes measure.Size     `json:"max_artifact_bytes" default:"4G" min:"1K" max:"1T" doc:"The limit for all collected files together."`
	CancelGrace      measure.Duration `json:"cancel_grace" default:"30s" min:"1s" max:"1h" doc:"The time between SIGTERM and SIGKILL."`
	Retries          Retries          `json:"retries" doc:"How often failed steps are retried."`
	Hang             Hang             `json:"hang" doc:"Signs of a stuck agent. Each is reported as an event before the agent counts as hung."`
	CrashLoop        CrashLoop        `json:"crash_loop" doc:"When to give up on an agent or a VM that keeps failing."`
}

// DefaultLifecycle returns the defaults.
func DefaultLifecycle() (l Lifecycle) {
	setDefaults(reflect.ValueOf(&l).Elem())
	return l
}

// Retries defines how often failed steps are retried.
type Retries struct {
	Clone     int              `json:"clone" default:"3" min:"0" max:"10" doc:"Retries of fetching the repository, after 5, 10, 20 … 60 s."`
	Provision int              `json:"provision" default:"2" min:"0" max:"10" doc:"Retries of creating the VM, after 10, 30 s."`
	Connect   measure.Duration `json:"connect" default:"5m" min:"1s" max:"1h" doc:"How long a running VM may be unreachable."`
}

// Hang defines which events are reported about an agent before it counts as hung.
type Hang struct {
	NoOutput      measure.Duration `json:"no_output" default:"10m" min:"1s" max:"90d" doc:"An agent without output for this long is reported."`
	LowCPUPercent int              `json:"low_cpu_percent" default:"5" min:"0" max:"100" doc:"The CPU use below which an agent counts as idle, in percent of one CPU."`
	LowCPU        measure.Duration `json:"low_cpu" default:"15m" min:"1s" max:"90d" doc:"An agent that is idle for this long is reported."`
	NoProgress    measure.Duration `json:"no_progress" default:"20m" min:"1s" max:"90d" doc:"An agent without a tool call, turn or token for this long is reported."`
}

// CrashLoop defines when to give up an agent or a VM that keeps ending.
type CrashLoop struct {
	Restarts     int              `json:"restarts" default:"5" min:"0" max:"100" doc:"This many restarts of the agent within the window lead to a new VM."`
	Window       measure.Duration `json:"window" default:"10m" min:"1s" max:"1d" doc:"The period in which restarts count."`
	HealthyAfter measure.Duration `json:"healthy_after" default:"60s" min:"1s" max:"1d" doc:"A run of this length resets the count."`
	Rebuilds     int              `json:"rebuilds" default:"3" min:"0" max:"20" doc:"How often a lost VM is replaced by a new one."`
}

// Encode returns t as the JSON that the store holds. The JSON is itself a manifest.
func (t *Task) Encode() ([]byte, error) {
	data, err := json.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("encode manifest: %w", err)
	}
	return data, nil
}

// Decode reads what Encode wrote. It does not check the task again, so an accepted task
// stays readable when bounds change.
func Decode(data []byte) (*Task, error) {
	t := &Task{}
	if err := json.Unmarshal(data, t); err != nil {
		return nil, fail.New(fail.Failure, "decode manifest: %w", err)
	}
	return t, nil
}

// Validate checks a Task that was changed after parsing. Its errors name fields instead
// of lines.
func (t *Task) Validate() error {
	data, err := t.Encode()
	if err != nil {
		return err
	}
	_, _, err = Parse("", data, "")
	return err
}
