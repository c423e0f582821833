package manifest

import (
	"fmt"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/strictyaml"
)

// document is a manifest as written: a Task, or one with the short form of its agent.
type document struct {
	Task
	Claude *claude `json:"claude,omitempty" doc:"The short form of an agent of kind claude. Either this or agent."`
}

// Parse reads a manifest in YAML or JSON. Its error wraps a *strictyaml.Error with all problems,
// at most 20, each in the form NAME:LINE:COLUMN: problem and fix, where name is NAME.
// Repository paths that begin with . are relative to the directory dir; without dir
// they are refused. The notices, in the same form, concern valid input that was
// probably not intended.
func Parse(name string, data []byte, dir string) (*Task, []string, error) {
	return ParseIn("", name, data, dir)
}

// ParseIn is like Parse, but for a task that runs in the given session, regardless of
// the session in its manifest. With "" the manifest decides.
func ParseIn(session, name string, data []byte, dir string) (*Task, []string, error) {
	return parse(session, name, data, dir, false)
}

// ParseSubtask is like Parse, but for a task that has its repository and the size of its VM from
// another one, unless it names them.
func ParseSubtask(name string, data []byte) (*Task, []string, error) {
	return parse("", name, data, "", true)
}

func parse(session, name string, data []byte, dir string, inherits bool) (*Task, []string, error) {
	p := strictyaml.Problems{What: "manifest"}
	root := read(data, &p)
	if root == nil {
		return nil, nil, refuse(&p, name)
	}
	doc := &document{}
	setDefaults(reflect.ValueOf(&doc.Task).Elem())
	d := &decoder{Problems: &p, inherits: inherits, inSession: map[string]*strictyaml.Node{"": root}}
	d.object(root, "", reflect.ValueOf(doc).Elem())
	if root.Kind == strictyaml.Object {
		if session != "" {
			d.inSession["vm.session"], doc.VM.Session = root, session
		}
		d.checkOwnership("", reflect.TypeFor[Task]())
		d.agent(doc)
		d.secrets(&doc.Task)
		d.repository(&doc.Task, dir)
	}
	if err := refuse(&p, name); err != nil {
		return nil, nil, err
	}
	t := &doc.Task
	t.source = &source{name, d.inSession}
	if t.VM.Profile == "" && t.VM.Session == "" && !inherits {
		t.VM.applyProfile()
	}
	return t, append(d.priority(name, t), d.network(name, t)...), nil
}

func read(data []byte, p *strictyaml.Problems) *strictyaml.Node {
	top := &strictyaml.Node{Line: 1, Col: 1}
	if len(data) > MaxBytes {
		p.Bad(top, "", "is larger than 1 MiB; put long texts into a file of the repository")
		return nil
	}
	root := strictyaml.Read(data, p)
	if root != nil && root.Kind == strictyaml.Null {
		p.Bad(root, "", "is empty")
		return nil
	}
	return root
}

// refuse returns the problems as an error with a hint, or nil if there are none.
func refuse(p *strictyaml.Problems, name string) error {
	err := p.Err(name)
	if err == nil {
		return nil
	}
	return fail.New(fail.Usage, "%w", err).WithHint("agent-sessionizer task schema # every key, its default and its bounds")
}

// agent merges the two ways to write an agent, and checks what each kind needs.
func (d *decoder) agent(doc *document) {
	long, short := d.inSession["agent"], d.inSession["claude"]
	switch {
	case long != nil && short != nil:
		d.Bad(short, "claude", "cannot be combined with agent; remove one of the two")
		return
	case long == nil && short == nil:
		d.Bad(d.inSession[""], "", "has no agent; add claude with a prompt, or agent with a kind")
		return
	case doc.Claude != nil:
		c := doc.Claude
		doc.Agent = Agent{Kind: Claude, Prompt: c.Prompt, Model: c.Model, MaxTurns: c.MaxTurns, AllowedTools: c.AllowedTools, Permissions: c.Permissions}
		return
	}
	a := &doc.Agent
	only := func(whose string, keys ...string) {
		for _, key := range keys {
			if n := d.inSession["agent."+key]; n != nil {
				d.Bad(n, "agent."+key, "is allowed only for %s", whose)
			}
		}
	}
	needs := func(key string) {
		if d.inSession["agent."+key] == nil {
			d.Bad(long, "agent."+key, "is missing; an agent of kind %s requires it", a.Kind)
		}
	}
	switch a.Kind {
	case Claude:
		needs("prompt")
		only("command", "command")
		if a.MaxTurns == 0 {
			a.MaxTurns = defaultTurns
		}
	case Codex:
		needs("prompt")
		only("command", "command")
		only("claude", "max_turns", "allowed_tools")
	case Command:
		needs("command")
		only("claude and codex", "model", "permissions")
		only("claude", "max_turns", "allowed_tools")
		if n := d.inSession["agent.command"]; n != nil && n.Kind == strictyaml.List && (len(a.Command) == 0 || a.Command[0] == "") {
			d.Bad(n, "agent.command", "must begin with a program")
		}
	}
}

// secrets checks the form of the references; package secret checks the rest.
func (d *decoder) secrets(t *Task) {
	seen := map[string]bool{}
	for i, s := range t.Secrets {
		at := fmt.Sprintf("secrets[%d].", i)
		name, key := d.inSession[at+"name"], d.inSession[at+"key"]
		if name != nil && s.Name != "" {
			if seen[s.Name] {
				d.Bad(name, at+"name", "is already the name of another secret")
			}
			if _, ok := t.Agent.Env[s.Name]; ok {
				d.Bad(name, at+"name", "is also set in agent.env; remove one of the two")
			}
			seen[s.Name] = true
		}
		if key == nil || s.Key == "" {
			continue
		}
		switch {
		case s.Source == "env" && rules["variable"].broken(s.Key) != "":
			d.Bad(key, at+"key", "must be the name of an environment variable")
		case (s.Source == "file" || s.Source == "age") && !strings.HasPrefix(s.Key, "/") && !strings.HasPrefix(s.Key, "~/"):
			d.Bad(key, at+"key", "must be a file path that begins with / or ~/")
		case s.Source == "op" && strings.Count(strings.TrimPrefix(s.Key, "op://"), "/") < 2:
			d.Bad(key, at+"key", "must be vault/item/field; copy the secret reference in 1Password")
		case s.Source == "vault" && !strings.Contains(strings.Trim(s.Key, ":"), ":"):
			d.Bad(key, at+"key", "must be path:key, the path of a secret in Vault and a key of it")
		case s.Source == "keychain" && !strings.Contains(strings.Trim(s.Key, "/"), "/"):
			d.Bad(key, at+"key", "must be service/account, of an entry of the keychain")
		}
	}
}

// repository makes a relative path absolute.
func (d *decoder) repository(t *Task, dir string) {
	n, url := d.inSession["repository.url"], t.Repository.URL
	relative := url == "." || url == ".." || strings.HasPrefix(url, "./") || strings.HasPrefix(url, "../")
	switch {
	case n == nil || !relative:
		return
	case dir == "":
		d.Bad(n, "repository.url", "is relative, but this manifest has no directory; write the absolute path")
		return
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		d.Bad(n, "repository.url", "is relative to a directory that no longer exists; write the absolute path")
		return
	}
	t.Repository.URL = filepath.Join(dir, url)
	if why := rules["url"].broken(t.Repository.URL); why != "" {
		d.Bad(n, "repository.url", "is relative to the manifest's directory; as an absolute path it %s", why)
	}
}

// applyProfile fills in the resources that a profile would define.
func (v *VM) applyProfile() {
	if v.CPUs == 0 {
		v.CPUs = defaultCPUs
	}
	if v.Memory == 0 {
		v.Memory = defaultMemory
	}
	if v.Disk == 0 {
		v.Disk = defaultDisk
	}
}

// priorities maps the meaningful values of labels.priority.
var priorities = map[string]int{"high": 50, "normal": 0, "low": -50}

func (d *decoder) priority(name string, t *Task) []string {
	word, ok := t.Metadata.Labels["priority"]
	if !ok || d.inSession["metadata.priority"] != nil {
		return nil
	}
	if t.Metadata.Priority, ok = priorities[word]; ok {
		return nil
	}
	return d.notice(name, "metadata.labels", "has a priority other than high, normal or low, so it is only a label")
}

func (d *decoder) network(name string, t *Task) []string {
	if t.VM.NetworkMode != "full" {
		return nil
	}
	return d.notice(name, "vm.network_mode", "is full, which is the same as open: a VM accepts no connections except SSH from this host")
}

func (d *decoder) notice(name, field, text string) []string {
	n := d.inSession[field]
	return []string{strictyaml.Problem{Line: n.Line, Column: n.Col, Field: field, Text: text}.Format(name)}
}
