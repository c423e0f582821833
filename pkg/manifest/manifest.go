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
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// MaxBytes is the maximum size of a manifest.
const MaxBytes = 1 << 20

// Task is a manifest with all defaults filled in and `claude:` converted to Agent.
type Task struct {
	Version    string     `json:"version" required:"true" enum:"1" doc:"The version of this format."`
	Kind       string     `json:"kind" required:"true" enum:"Task" doc:"What the manifest describes."`
	Metadata   Metadata   `json:"metadata" doc:"How the task is found again, and how urgent it is."`
	Repository Repository `json:"repository,omitzero" required:"own" doc:"What the agent works on."`
	Agent      Agent      `json:"agent" doc:"Who works, and on what. Either this or claude."`
	VM         VM         `json:"vm" doc:"The VM that the task gets for itself, or the session that it runs in."`
	Secrets    []Secret   `json:"secrets,omitempty" max:"64" quiet:"true" own:"*" doc:"Environment variables of the agent, by reference. They are resolved while the VM boots, and are never written to a disk."`
	Lifecycle  Lifecycle  `json:"lifecycle" doc:"How long things may take, what happens when they fail, and what is kept."`

	source *source // nil if the task was not parsed
}

// Metadata identifies the task for people and sets its priority.
type Metadata struct {
	Name     string            `json:"name,omitempty" like:"name" doc:"For people. It need not be unique; ids are generated."`
	Labels   map[string]string `json:"labels,omitempty" max:"32" keys:"label" like:"label value" doc:"For finding tasks. A label priority of high, normal or low is a priority of 50, 0 or -50, where no priority is given."`
	Priority int               `json:"priority" default:"0" min:"-100" max:"100" doc:"Among those that wait, tasks of a higher priority start first."`
}

// Repository describes what the agent works on.
type Repository struct {
	URL     string `json:"url,omitempty" required:"own" like:"url" doc:"What open takes: owner/repo on github.com, a git URL, a path. Paths that begin with . are relative to the manifest's directory."`
	Branch  string `json:"branch,omitempty" own:"*" like:"branch" doc:"To start from; the default branch when left out."`
	Commit  string `json:"commit,omitempty" own:"*" like:"commit" doc:"To start from, whole or abbreviated; the branch's last when left out."`
	Subpath string `json:"subpath,omitempty" like:"subpath" doc:"The directory of the repository in which the agent starts; its root when left out."`
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
	Prompt       string            `json:"prompt,omitempty" like:"prompt" doc:"What the agent is to do; claude and codex need one. It is one argument, so it has 100 KiB at most."`
	Model        string            `json:"model,omitempty" like:"model" doc:"The model; the agent's own choice when left out. Not for command."`
	MaxTurns     int               `json:"max_turns,omitempty" min:"1" max:"10000" doc:"After this many turns claude stops; 100 when left out. Only for claude."`
	AllowedTools []string          `json:"allowed_tools,omitempty" max:"100" like:"tool" doc:"The tools that claude has; all when left out. Only for claude."`
	Command      []string          `json:"command,omitempty" max:"256" like:"argument" doc:"Program and arguments, no shell. Only for command, which needs one. The program finds the prompt in TASK.md."`
	Env          map[string]string `json:"env,omitempty" max:"64" keys:"variable" like:"value" quiet:"true" doc:"Environment variables of the agent. Credentials belong in secrets."`
}

// claude is the short form of an Agent of that kind.
type claude struct {
	Prompt       string   `json:"prompt" required:"true" like:"prompt" doc:"What the agent is to do. It is one argument, so it has 100 KiB at most."`
	Model        string   `json:"model,omitempty" like:"model" doc:"The model; the agent's own choice when left out."`
	MaxTurns     int      `json:"max_turns" default:"100" min:"1" max:"10000" doc:"After this many turns the agent stops."`
	AllowedTools []string `json:"allowed_tools,omitempty" max:"100" like:"tool" doc:"The tools that the agent has; all when left out."`
}

// defaultTurns is the default of max_turns.
const defaultTurns = 100

// VM describes the VM that a task gets for itself, or the session that it runs in.
// CPUs, Memory and Disk are 0 if the profile or the session defines them.
type VM struct {
	Session     string `json:"session,omitempty" like:"session" doc:"A session that is there, by its name, its id or the start of that. The task runs in it, and leaves it as it found it but for what the agent did."`
	Profile     string `json:"profile,omitempty" own:"*" like:"word" doc:"A profile of the configuration. What it says of resources is the default here."`
	CPUs        int    `json:"cpus,omitempty" own:"*" min:"1" max:"1024" doc:"4 when there is no profile."`
	Memory      Size   `json:"memory,omitempty" own:"*" min:"512M" max:"64T" doc:"8G when there is no profile."`
	Disk        Size   `json:"disk,omitempty" own:"*" min:"4G" max:"1024T" doc:"40G when there is no profile."`
	NetworkMode string `json:"network_mode,omitempty" own:"*" enum:"isolated|allowlist|open|outbound|full" doc:"isolated: nothing. allowlist: the names of the configuration. open: the internet, without the local network; outbound and full are other words for it. As configured when left out."`
}

// Defaults for a VM without a profile.
const (
	defaultCPUs   = 4
	defaultMemory = 8 * gib
	defaultDisk   = 40 * gib
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
	Name   string `json:"name" required:"true" like:"secret name" doc:"The environment variable that the agent gets."`
	Source string `json:"source" required:"true" enum:"env|file|op|cmd" else:"for vault and others take cmd, with a command that prints the value" doc:"Where its value comes from on the host: a variable, a file, 1Password, the output of a command."`
	Key    string `json:"key" required:"true" like:"key" doc:"Which one: the variable's name; the file's path; vault/item/field; the command."`
}

// Ref returns the secret's reference in the form that the configuration uses and
// package secret reads: env:NAME, file:/path, op://vault/item/field or cmd:command.
func (s Secret) Ref() string {
	if s.Source == "op" {
		return "op://" + strings.TrimPrefix(s.Key, "op://")
	}
	return s.Source + ":" + s.Key
}

// Lifecycle defines how long things may take, what happens when they fail, and what is
// kept.
type Lifecycle struct {
	Timeout          Duration  `json:"timeout" default:"24h" min:"1s" max:"90d" doc:"For the whole run of the agent."`
	StageTimeout     Duration  `json:"stage_timeout" default:"15m" min:"1s" max:"1d" doc:"For fetching the repository."`
	ProvisionTimeout Duration  `json:"provision_timeout" default:"10m" min:"1s" max:"1d" doc:"For making the VM."`
	HangTimeout      Duration  `json:"hang_timeout" default:"30m" min:"1s" max:"90d" doc:"An agent that shows no life for so long hangs."`
	HangAction       string    `json:"hang_action" default:"terminate" enum:"notify|terminate|restart|preserve" own:"preserve" doc:"What happens to one that hangs: an event only; it is ended and the task fails; it is started again; the task fails and the VM is kept."`
	FailureAction    string    `json:"failure_action" default:"destroy" enum:"destroy|preserve" own:"preserve" doc:"What happens to the VM of a task that failed."`
	PreserveFor      Duration  `json:"preserve_for" default:"2h" min:"1m" max:"30d" doc:"How long a VM is kept then."`
	SuccessCodes     []int     `json:"success_codes" default:"0" min:"1" max:"64" doc:"The agent's exit codes that mean success."`
	ArtifactPatterns []string  `json:"artifact_patterns,omitempty" max:"100" like:"pattern" doc:"Files of the checkout that are brought home, besides what changed. * and ? do not cross a /, ** does."`
	MaxArtifactBytes Size      `json:"max_artifact_bytes" default:"4G" min:"1K" max:"1T" doc:"Of all that is brought home."`
	CancelGrace      Duration  `json:"cancel_grace" default:"30s" min:"1s" max:"1h" doc:"Between SIGTERM and SIGKILL."`
	Retries          Retries   `json:"retries" doc:"How often what failed is tried again."`
	Hang             Hang      `json:"hang" doc:"What is told of an agent before it counts as hung: each is an event."`
	CrashLoop        CrashLoop `json:"crash_loop" doc:"When an agent or a VM that keeps ending is given up."`
}

// Retries defines how often failed steps are retried.
type Retries struct {
	Clone     int      `json:"clone" default:"3" min:"0" max:"10" doc:"Fetching the repository, after 5, 10, 20 … 60 s."`
	Provision int      `json:"provision" default:"2" min:"0" max:"10" doc:"Making the VM, after 10, 30 s."`
	Connect   Duration `json:"connect" default:"5m" min:"1s" max:"1h" doc:"How long a VM that runs may be out of reach."`
}

// Hang defines which events are reported about an agent before it counts as hung.
type Hang struct {
	NoOutput      Duration `json:"no_output" default:"10m" min:"1s" max:"90d" doc:"It wrote nothing for so long."`
	LowCPUPercent int      `json:"low_cpu_percent" default:"5" min:"0" max:"100" doc:"Of one CPU; less of it for low_cpu is an event."`
	LowCPU        Duration `json:"low_cpu" default:"15m" min:"1s" max:"90d" doc:"It used hardly any CPU for so long."`
	NoProgress    Duration `json:"no_progress" default:"20m" min:"1s" max:"90d" doc:"No tool call, turn or token for so long."`
}

// CrashLoop defines when to give up an agent or a VM that keeps ending.
type CrashLoop struct {
	Restarts     int      `json:"restarts" default:"5" min:"0" max:"100" doc:"So many within the window are enough."`
	Window       Duration `json:"window" default:"10m" min:"1s" max:"1d" doc:"The time in which restarts count."`
	HealthyAfter Duration `json:"healthy_after" default:"60s" min:"1s" max:"1d" doc:"After so long a run the count begins again."`
	Rebuilds     int      `json:"rebuilds" default:"3" min:"0" max:"20" doc:"So often a VM that is lost is made anew."`
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
