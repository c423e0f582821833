package config_test

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

// files holds a test's settings files and the directories that they are in.
type files struct {
	t     *testing.T
	paths config.Paths
	ship  fstest.MapFS
}

// newFiles returns small shipped defaults, without any file of the system or the user.
func newFiles(t *testing.T) *files {
	t.Helper()
	for _, name := range []string{"IMAGE", "PROFILE", "LIMA_HOME", "LIMITS_RUNNING", "LIMITS_MEMORY_RESERVE", "LIMITS_DISK_RESERVE"} {
		t.Setenv("AGENT_SESSIONIZER_"+name, "")
	}
	dir := t.TempDir()
	f := &files{t: t, paths: config.Paths{
		System: filepath.Join(dir, "etc"), Config: filepath.Join(dir, "home"), LimaHome: filepath.Join(dir, "vms"),
	}, ship: fstest.MapFS{}}
	for name, text := range map[string]string{
		"config.yaml": `image: ubuntu
limits: {running: 10, memory_reserve: 1GiB, disk_reserve: 5GiB}
network: {mode: allowlist, ports: [80, 443, 22]}
`,
		"resources.yaml":         "defaults: {cpus: 4, memory: 8GiB, disk: 50GiB}\n",
		"prices.yaml":            "date: 2026-01-02\n",
		"network-allowlist.txt":  "github.com\n*.npmjs.org\n",
		"network-groups/git.txt": "github.com\n",
	} {
		f.ship[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return f
}

func (f *files) write(dir, name, text string) {
	f.t.Helper()
	if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
		f.t.Fatal(err)
	}
}

func (f *files) system(name, text string) { f.t.Helper(); f.write(f.paths.System, name, text) }
func (f *files) user(name, text string)   { f.t.Helper(); f.write(f.paths.Config, name, text) }

func (f *files) load() *config.Config {
	f.t.Helper()
	c, err := config.Load(f.paths, f.ship)
	if err != nil {
		f.t.Fatal(err)
	}
	return c
}

func settings(t *testing.T, c *config.Config, repo config.RepoKey, profile string) config.Settings {
	t.Helper()
	s, err := c.For(repo, profile)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func compiled(t *testing.T, c *config.Config, s config.Settings, extra []policy.Rule, project *config.Project) *policy.Policy {
	t.Helper()
	p, err := c.Policy(s, config.Additions{Allow: extra}, project)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func patterns(p *policy.Policy) string {
	var names []string
	for _, r := range p.Names {
		names = append(names, r.String())
	}
	return strings.Join(names, " ")
}

func TestShippedDefaults(t *testing.T) {
	f := newFiles(t)
	shipped, err := sessionizer.Config.ReadFile("config/config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	f.ship["config.yaml"].Data = shipped
	for _, name := range []string{"resources.yaml", "network-allowlist.txt"} {
		if f.ship[name].Data, err = sessionizer.Config.ReadFile("config/" + name); err != nil {
			t.Fatal(err)
		}
	}
	entries, err := sessionizer.Config.ReadDir("config/network-groups")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		text, err := sessionizer.Config.ReadFile("config/network-groups/" + e.Name())
		if err != nil {
			t.Fatal(err)
		}
		f.ship["network-groups/"+e.Name()] = &fstest.MapFile{Data: text}
	}
	c := f.load()
	delete(c.Groups(), "git") // defined by this test, not shipped
	want := "anthropic debian docker github go node npm openai pypi rust ubuntu"
	if got := strings.Join(slices.Sorted(maps.Keys(c.Groups())), " "); got != want {
		t.Errorf("names of the shipped groups = %q, want %q", got, want)
	}
	header, _, _ := strings.Cut(string(f.ship["network-allowlist.txt"].Data), "\n\n")
	for name, rules := range c.Groups() {
		if len(rules) == 0 || !strings.Contains(header, name) {
			t.Errorf("group %s = %v, want rules, and its name in the allowlist's header:\n%s", name, rules, header)
		}
	}
	s := settings(t, c, "github.com/o/r", "")
	if c.Image != "ubuntu" {
		t.Errorf("Image = %q, want %q", c.Image, "ubuntu")
	}
	limits := config.Limits{Running: 10, MemoryReserve: 1 << 30, DiskReserve: 5 << 30, SavedHome: 256 << 20, MirrorSize: 20 << 30, MirrorRefs: 50_000, MirrorTime: 2 * time.Hour}
	if diff := cmp.Diff(limits, c.Limits); diff != "" {
		t.Errorf("Limits mismatch (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(config.Resources{CPUs: 4, Memory: 8 << 30, Disk: 50 << 30}, s.Resources); diff != "" {
		t.Errorf("Resources mismatch (-want +got):\n%s", diff)
	}
	if len(s.Secrets) != 0 {
		t.Errorf("Secrets = %v, want none", s.Secrets)
	}
	p := compiled(t, c, s, nil, nil)
	if p.Mode != policy.Allowlist {
		t.Errorf("Mode = %q, want %q", p.Mode, policy.Allowlist)
	}
	if diff := cmp.Diff([]uint16{80, 443, 22}, p.Ports); diff != "" {
		t.Errorf("Ports mismatch (-want +got):\n%s", diff)
	}
	if got := patterns(p); !strings.Contains(got, "api.anthropic.com") {
		t.Errorf("allowed names = %q, want %q among them", got, "api.anthropic.com")
	}
	if !p.Enforced {
		t.Error("Enforced = false, want true")
	}
}

func TestLaterLayersWin(t *testing.T) {
	f := newFiles(t)
	check := func(layer, image string, running int, reserve config.Size, cpus int, mode config.Mode) {
		t.Helper()
		c := f.load()
		s := settings(t, c, "github.com/o/r", "")
		if c.Image != image || c.Limits.Running != running || c.Limits.MemoryReserve != reserve || s.Resources.CPUs != cpus || s.Network.Mode != mode {
			t.Errorf("%s: image %q, limits %+v, resources %+v, mode %q, want image %q, running %d, memory reserve %v, %d CPUs, mode %q", layer, c.Image, c.Limits, s.Resources, s.Network.Mode, image, running, reserve, cpus, mode)
		}
		if c.Limits.DiskReserve != 5<<30 || s.Resources.Memory != 8<<30 {
			t.Errorf("%s: disk reserve %v, memory %v, which no file contains, want 5GiB, 8GiB", layer, c.Limits.DiskReserve, s.Resources.Memory)
		}
	}
	check("default", "ubuntu", 10, 1<<30, 4, "allowlist")
	f.system("config.yaml", "image: sys\nlimits: {running: 20, memory_reserve: 2GiB}\nnetwork: {mode: open}\n")
	f.system("resources.yaml", "defaults: {cpus: 2}\n")
	check("system", "sys", 20, 2<<30, 2, "open")
	f.user("config.yaml", "image: mine\nlimits: {running: 30}\nnetwork: {mode: isolated}\n")
	f.user("resources.yaml", "defaults: {cpus: 3}\n")
	check("user", "mine", 30, 2<<30, 3, "isolated")
	t.Setenv("AGENT_SESSIONIZER_IMAGE", "env")
	t.Setenv("AGENT_SESSIONIZER_LIMITS_RUNNING", "1")
	t.Setenv("AGENT_SESSIONIZER_LIMITS_MEMORY_RESERVE", "3G")
	check("environment", "env", 1, 3<<30, 3, "isolated")
	if got, want := f.load().Files, []string{"etc/config.yaml", "home/config.yaml", "etc/resources.yaml", "home/resources.yaml"}; len(got) != 4 || !strings.HasSuffix(got[0], want[0]) || !strings.HasSuffix(got[3], want[3]) {
		t.Errorf("Files = %q, want 4 with the ends %q", got, want)
	}
}

func TestBadEnvironment(t *testing.T) {
	for name, value := range map[string]string{
		"LIMITS_RUNNING": "many", "LIMITS_MEMORY_RESERVE": "-1GiB", "LIMITS_DISK_RESERVE": "much", "LIMA_HOME": "relative/dir",
	} {
		t.Run(name, func(t *testing.T) {
			f := newFiles(t)
			t.Setenv("AGENT_SESSIONIZER_"+name, value)
			if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), value) {
				t.Errorf("Load with AGENT_SESSIONIZER_%s=%s: error %v, want a usage error with the value", name, value, err)
			}
		})
	}
}

func TestBadFiles(t *testing.T) {
	const conf, res, names = "config.yaml", "resources.yaml", "network-allowlist.txt"
	for _, c := range []struct {
		name, file, text string
		line             int
		want             string
	}{
		{"unknown key", conf, "image: x\nimages: y\n", 2, "images"},
		{"unknown key below", conf, "network:\n  mode: open\n  modes: x\n", 3, "modes"},
		{"key in capitals", conf, "Image: x\n", 1, "Image"},
		{"unknown key of a profile", conf, "profiles:\n  p:\n    hooks: {}\n", 3, "hooks"},
		{"key twice", conf, "image: x\nimage: y\n", 2, "image"},
		{"not YAML", conf, "image: [x\n", 2, "that begins on line 1"},
		{"a list for a map", conf, "network: [a]\n", 1, "an object"},
		{"a map for a text", conf, "\nimage: {a: b}\n", 2, ""},
		{"text for a number", conf, "limits:\n  running: many\n", 2, ""},
		{"second document", conf, "image: x\n---\nimage: y\n", 2, "second"},
		{"bad mode", conf, "network:\n  mode: closed\n", 2, "isolated, allowlist or open"},
		{"list for a mode", conf, "network:\n  mode: [open]\n", 2, "isolated, allowlist or open"},
		{"port 0", conf, "network:\n  ports:\n    - 443\n    - 0\n", 4, "0"},
		{"port too high", conf, "network:\n  ports: [65536]\n", 2, "65536"},
		{"port by name", conf, "network:\n  ports: [https]\n", 2, "https"},
		{"empty port", conf, "network:\n  ports:\n    -\n", 3, "empty"},
		{"empty name", conf, "network:\n  allow:\n    - a.com\n    - ~\n", 4, "empty"},
		{"URL for a name", conf, "network:\n  allow:\n    - https://a.com/\n", 3, "a.com"},
		{"address for a name", conf, "network:\n  allow: [10.0.0.1]\n", 2, "10.0.0.1"},
		{"list for a name", conf, "network:\n  allow: [[a.com]]\n", 2, "name"},
		{"service without a port", conf, "network:\n  host_services: [192.168.5.2]\n", 2, "ADDRESS:PORT"},
		{"service by name", conf, "network:\n  host_services: ['db.lan:5432']\n", 2, "must be ADDRESS:PORT, got the name"},
		{"service of no machine", conf, "network:\n  host_services: ['0.0.0.0:5432']\n", 2, "localhost:PORT"},
		{"enforce in words", conf, "network:\n  enforce: please\n", 2, ""},
		{"bad port of a name", conf, "network:\n  allow: ['a.com:0']\n", 2, "NAME:PORT"},
		{"bad name that is denied", conf, "network:\n  deny: ['*']\n", 2, "mode: open"},
		{"not a group's name", conf, "network:\n  allow: ['@a/b']\n", 2, "@github"},
		{"unknown group", conf, "network:\n  allow: ['@nothing']\n", 0, "network.allow: group \"@nothing\" does not exist; the groups are @git"},
		{"unknown group of a profile", conf, "profiles:\n  p: {network: {deny: ['@nothing']}}\n", 0, "profiles.p.network.deny"},
		{"unknown group of a repository", conf, "repos:\n  o/r: {network: {allow: ['@nothing']}}\n", 0, "repos.github.com/o/r.network.allow"},
		{"allowlist with an unknown group", names, "@git\n@nothing\n", 2, "the groups are @git"},
		{"group of groups", "network-groups/mine.txt", "a.org\n@git\n", 2, "write names"},
		{"bad name in a group", "network-groups/mine.txt", "10.0.0.1\n", 1, "IP address"},
		{"bad size", conf, "limits:\n  disk_reserve: a lot\n", 2, "512MiB or 8G"},
		{"relative lima_home", conf, "image: x\nlima_home: vms\n", 2, "absolute"},
		{"no VM at all", conf, "limits: {running: -1}\n", 1, "running"},
		{"pool of too many", conf, "limits:\n  running: 3\npool: 99\n", 3, "0 to 8"},
		{"prepared in no way", conf, "prepare: hot\n", 1, "golden"},
		{"bad size of a VM", res, "defaults:\n  memory: 8 elephants\n", 2, "elephants"},
		{"negative size", res, "defaults:\n  memory: -8GiB\n", 2, "-8GiB"},
		{"zero size", res, "defaults:\n  disk: 0\n", 2, "0"},
		{"endless size", res, "overrides:\n  o/r:\n    disk: 9000000000TiB\n", 3, "9000000000TiB"},
		{"map for a size", res, "defaults:\n  disk: {gib: 1}\n", 2, "size"},
		{"text for CPUs", res, "defaults: {cpus: four}\n", 1, ""},
		{"a directory's name for a repository", res, "overrides:\n  repo: {}\n", 2, "host/owner/repo"},
		{"relative path for a repository", conf, "repos:\n  local:vms: {}\n", 2, "host/owner/repo"},
		{"unknown key of a repository", res, "overrides:\n  o/r:\n    ram: 8GiB\n", 3, "ram"},
		{"allowlist with a bad port", names, "github.com\n# fine\ngithub.com:https\n", 3, "NAME:PORT"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFiles(t)
			f.user(c.file, c.text)
			_, err := config.Load(f.paths, f.ship)
			if err == nil || fail.CodeOf(err) != fail.Usage {
				t.Fatalf("Load of %s with %q: error %v, want a usage error", c.file, c.text, err)
			}
			file := filepath.Join(f.paths.Config, c.file)
			at := file + ":"
			if c.line > 0 {
				at = fmt.Sprintf("%s:%d", file, c.line)
			}
			if c.line >= 0 && (!strings.Contains(err.Error(), at) || fail.HintOf(err) != "agent-sessionizer config edit "+c.file) {
				t.Errorf("Load of %q: error %v, hint %q, want %q in it, hint %q", c.text, err, fail.HintOf(err), at, "agent-sessionizer config edit "+c.file)
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("Load of %q: error %v, want %q in it", c.text, err, c.want)
			}
			if strings.Count(err.Error(), "\n") > 1 {
				t.Errorf("Load of %q: error %v, want at most two lines", c.text, err)
			}
		})
	}
}

func TestEmptyFilesSayNothing(t *testing.T) {
	for _, text := range []string{"", "\n\n", "# a comment\n", "---\n", "network:\nsecrets:\n", "\ufeffimage: ubuntu\n"} {
		f := newFiles(t)
		f.user("config.yaml", text)
		c, err := config.Load(f.paths, f.ship)
		if err != nil {
			t.Errorf("Load of %q: error %v, want nil", text, err)
			continue
		}
		if mode := settings(t, c, "github.com/o/r", "").Network.Mode; c.Image != "ubuntu" || mode != "allowlist" {
			t.Errorf("Load of %q: image %q, mode %q, want %q, %q", text, c.Image, mode, "ubuntu", "allowlist")
		}
	}
}

func TestUnreadableFile(t *testing.T) {
	f := newFiles(t)
	if err := os.MkdirAll(filepath.Join(f.paths.Config, "config.yaml"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "config.yaml") {
		t.Fatalf("Load with a directory as config.yaml: error %v, want a usage error with %q", err, "config.yaml")
	}
	f = newFiles(t)
	f.user("config.yaml", strings.Repeat("# much\n", 1<<18))
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "larger than 1MiB") {
		t.Fatalf("Load of a large file: error %v, want a usage error with %q", err, "larger than 1MiB")
	}
}

func TestAllowlistIsReplaced(t *testing.T) {
	f := newFiles(t)
	check := func(when, want string) {
		t.Helper()
		c := f.load()
		got := patterns(compiled(t, c, settings(t, c, "github.com/o/r", ""), []policy.Rule{{Pattern: "extra.org"}}, nil))
		if got != want {
			t.Errorf("allowed names %s = %q, want %q", when, got, want)
		}
	}
	check("by default", "github.com *.npmjs.org extra.org")
	f.user("config.yaml", "network: {allow: [More.Example.ORG]}\n")
	check("with names of config.yaml", "github.com *.npmjs.org more.example.org extra.org")
	f.system("network-allowlist.txt", "system.org\n")
	check("with the system's allowlist", "system.org more.example.org extra.org")
	f.user("network-allowlist.txt", "# nothing\n")
	check("with the user's empty allowlist", "more.example.org extra.org")
}

// rules formats rules as a person writes them, each with the file it comes from.
func rules(list []policy.Rule) string {
	var all []string
	for _, r := range list {
		all = append(all, r.String()+" "+filepath.Base(r.Source))
	}
	return strings.Join(all, "; ")
}

func TestEntries(t *testing.T) {
	f := newFiles(t)
	f.ship["network-groups/git.txt"] = &fstest.MapFile{Data: []byte("github.com:22,443\n*.github.com\n")}
	f.ship["network-groups/go.txt"] = &fstest.MapFile{Data: []byte("*.golang.org\n")}
	f.user("network-allowlist.txt", "a.org:8443,443\n@go # tools\n")
	f.user("config.yaml", `
network: {allow: [B.org:22, '@git', '@git', 'b.org:9418'], deny: ['*.github.com:80', x.org]}
repos:
  o/r: {network: {deny: [y.org]}}
`)
	c := f.load()
	p := compiled(t, c, settings(t, c, "github.com/o/r", ""), nil, nil)
	if got, want := rules(p.Names), "a.org:443,8443 network-allowlist.txt:1; *.golang.org network-allowlist.txt:2 (@go); b.org:22 network.allow; "+
		"github.com:22,443 network.allow (@git); *.github.com network.allow (@git); b.org:9418 network.allow"; got != want {
		t.Errorf("allowed rules = %q, want %q", got, want)
	}
	if got, want := rules(p.Denied), "*.github.com:80 network.deny; x.org network.deny; y.org network.deny"; got != want {
		t.Errorf("denied rules = %q, want %q", got, want)
	}

	// A user's group replaces the shipped one, and changes the stamp.
	stamp := c.Stamp()
	f.user("network-groups/git.txt", "mine.org\n")
	f.user("network-groups/.git.txt.swp", "\x00")
	f.user("network-groups/git.txt~", "\x00")
	if c.Stamp() == stamp {
		t.Errorf("Stamp() after a new group = %v, want another", stamp)
	}
	stamp = c.Stamp()
	c = f.load()
	p = compiled(t, c, settings(t, c, "", ""), nil, nil)
	if got, want := rules(p.Names), "mine.org network.allow (@git); b.org:9418"; !strings.Contains(got, want) {
		t.Errorf("allowed rules with the user's group = %q, want %q in it", got, want)
	}
	if file := filepath.Join(f.paths.Config, "network-groups", "git.txt"); !slices.Contains(c.Files, file) {
		t.Errorf("Files = %q, want %q among them", c.Files, file)
	}
	f.user("network-groups/git.txt", "mine.org\nother.org\n")
	if c.Stamp() == stamp {
		t.Errorf("Stamp() after a changed group = %v, want another", stamp)
	}
	f.user("network-groups/Bad Name.txt", "")
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "Bad Name.txt") {
		t.Errorf("Load with a bad group name: error %v, want a usage error with %q", err, "Bad Name.txt")
	}
}

func TestEnforce(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", `
network: {enforce: false}
profiles:
  enforced: {network: {enforce: true}}
repos:
  o/open: {profile: enforced, network: {enforce: false}}
  o/shut: {profile: enforced}
`)
	c := f.load()
	for repo, want := range map[config.RepoKey]bool{"": false, "github.com/o/open": false, "github.com/o/shut": true} {
		s := settings(t, c, repo, "")
		if p := compiled(t, c, s, nil, project(t, "network: {mode: isolated}")); s.Network.Enforced() != want || p.Enforced != want {
			t.Errorf("repository %q: enforced by the settings: %v, by the policy: %v, want %v", repo, s.Network.Enforced(), p.Enforced, want)
		}
	}
}

func TestHostServices(t *testing.T) {
	for text, want := range map[string]string{
		"localhost:5432": "127.0.0.1:5432", "LOCALHOST:5432": "127.0.0.1:5432", "127.0.0.1:3000": "127.0.0.1:3000",
		"192.168.5.2:8080": "192.168.5.2:8080", "[::ffff:10.0.0.1]:22": "10.0.0.1:22", "[::1]:80": "[::1]:80",
	} {
		if got, err := config.ParseHostService(text); err != nil || got.String() != want {
			t.Errorf("ParseHostService(%q) = %v, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"", "localhost", "localhost:0", "localhost:x", "db.lan:5432", "5432", ":5432", "0.0.0.0:1", "[::]:1", "224.0.0.1:1", "[fe80::1%eth0]:1", "127.0.0.1:65536"} {
		if got, err := config.ParseHostService(text); err == nil || !strings.Contains(err.Error(), "ADDRESS:PORT") {
			t.Errorf("ParseHostService(%q) = %v, %v, want an error with %q", text, got, err, "ADDRESS:PORT")
		}
	}
	f := newFiles(t)
	f.user("config.yaml", "network: {host_services: ['localhost:5432']}\n")
	c := f.load()
	p, err := c.Policy(settings(t, c, "", ""), config.Additions{HostServices: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:3000")}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(p.HostServices), "[127.0.0.1:5432 127.0.0.1:3000]"; got != want {
		t.Errorf("HostServices = %s, want %s", got, want)
	}
}

// checkSettings compares profile, resources and secrets.
func checkSettings(t *testing.T, got, want config.Settings) {
	t.Helper()
	got.Network, got.Persist, got.Repo = want.Network, want.Persist, want.Repo
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("settings of profile %s mismatch (-want +got):\n%s", want.Profile, diff)
	}
}

func TestProfilesAndRepositories(t *testing.T) {
	f := newFiles(t)
	f.system("config.yaml", `
secrets: {A: env:SYS_A, B: env:SYS_B}
network: {allow: [system.org]}
profiles:
  small: {resources: {cpus: 1}}
  theirs: {resources: {cpus: 7}}
repos:
  Acme/Theirs: {profile: theirs}
`)
	f.user("config.yaml", `
secrets: {B: env:MY_B}
profile: small
profiles:
  small: {resources: {memory: 1GiB}, secrets: {C: env:SMALL_C}, network: {allow: [small.org]}}
  Big: {resources: {cpus: 9}, network: {mode: open, ports: []}}
repos:
  Acme/App:
    profile: Big
    resources: {memory: 3GiB}
    secrets: {A: env:APP_A}
`)
	f.system("resources.yaml", "overrides:\n  acme/app: {cpus: 5, memory: 5GiB, disk: 60GiB}\n")
	f.user("resources.yaml", "overrides:\n  ACME/Mono: {disk: 100GiB}\n")
	c := f.load()

	s := settings(t, c, "github.com/o/r", "") // the user's profile small replaces the system's completely
	checkSettings(t, s, config.Settings{
		Profile: "small", Resources: config.Resources{CPUs: 4, Memory: 1 << 30, Disk: 50 << 30},
		Secrets: map[string]config.Secret{"A": {From: "env:SYS_A"}, "B": {From: "env:MY_B"}, "C": {From: "env:SMALL_C"}},
	})
	if got, want := fmt.Sprint(s.Network.Allow), "[system.org small.org]"; got != want {
		t.Errorf("Network.Allow of o/r = %s, want %s", got, want)
	}
	s = settings(t, c, "github.com/acme/app", "") // resources.yaml < profile < repository, in upper or lower case
	checkSettings(t, s, config.Settings{
		Profile: "Big", Resources: config.Resources{CPUs: 9, Memory: 3 << 30, Disk: 60 << 30},
		Secrets: map[string]config.Secret{"A": {From: "env:APP_A"}, "B": {From: "env:MY_B"}},
	})
	if s.Network.Mode != "open" {
		t.Errorf("Network.Mode of acme/app = %q, want %q", s.Network.Mode, "open")
	}
	if p := compiled(t, c, s, nil, nil); p.Mode != policy.Open || len(p.Ports) != 0 {
		t.Errorf("policy of acme/app: mode %q, ports %v, want %q, no ports", p.Mode, p.Ports, policy.Open)
	}
	if s = settings(t, c, "github.com/acme/app", "theirs"); s.Profile != "theirs" || s.Resources.CPUs != 7 { // selected by flag
		t.Errorf("acme/app with profile theirs: profile %q, %d CPUs, want %q, 7", s.Profile, s.Resources.CPUs, "theirs")
	}
	if s = settings(t, c, "github.com/acme/theirs", ""); s.Profile != "theirs" {
		t.Errorf("profile of acme/theirs = %q, want %q", s.Profile, "theirs")
	}
	if s = settings(t, c, "github.com/acme/mono", ""); s.Resources.Disk != 100<<30 || s.Resources.CPUs != 4 {
		t.Errorf("resources of acme/mono = %+v, want 100GiB of disk, 4 CPUs", s.Resources)
	}
	for repo, want := range map[config.RepoKey]string{"github.com/o/r": "env:SMALL_C", "github.com/acme/app": ""} {
		if got := settings(t, c, repo, "").Secrets["C"].From; got != want {
			t.Errorf("secret C of %s = %q, want %q", repo, got, want)
		}
	}

	_, err := c.For("github.com/o/r", "Small")
	if fail.CodeOf(err) != fail.Usage || fail.HintOf(err) == "" || !strings.Contains(err.Error(), "Big, small, theirs") {
		t.Errorf("For of profile Small: error %v, hint %q, want a usage error with %q and a hint", err, fail.HintOf(err), "Big, small, theirs")
	}
	f.user("resources.yaml", "overrides:\n  o/r: {cpus: -2}\n")
	if _, err := f.load().For("github.com/o/r", ""); fail.CodeOf(err) != fail.Usage {
		t.Errorf("For with -2 CPUs: error %v, want a usage error", err)
	}
}

// TestRepositoriesOfOtherHosts checks that an entry for owner/repo, with its secrets,
// applies to github.com and to no other host.
func TestRepositoriesOfOtherHosts(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", `
repos:
  Acme/App: {secrets: {T: env:GITHUB}}
  Git.Example.org/Team/App: {secrets: {T: env:EXAMPLE}}
  git.example.org:8443/team/app: {secrets: {T: env:PORT}}
  GitLab.com/Acme/Sub/App: {secrets: {T: env:GITLAB}}
  box/team/app: {secrets: {T: env:BOX}}
  git.example.org/single: {secrets: {T: env:SINGLE}}
  local:/home/me/app: {secrets: {T: env:LOCAL}}
`)
	c := f.load()
	for key, want := range map[config.RepoKey]string{
		"github.com/acme/app":           "env:GITHUB",
		"evil.example/acme/app":         "",
		"gitlab.com/acme/app":           "",
		"acme/app":                      "",
		"git.example.org/Team/App":      "env:EXAMPLE",
		"git.example.org/team/app":      "", // a different repository on that host
		"git.example.org:8443/team/app": "env:PORT",
		"gitlab.com/acme/sub/app":       "env:GITLAB",
		"box/team/app":                  "env:BOX",
		"git.example.org/single":        "env:SINGLE",
		"local:/home/me/app":            "env:LOCAL",
		"local:/tmp/app":                "",
		"app":                           "",
		"":                              "",
	} {
		if got := settings(t, c, key, "").Secrets["T"].From; got != want {
			t.Errorf("secret T of %s = %q, want %q", key, got, want)
		}
	}
}

// TestWrongKind checks that a value of the wrong type is reported in the terms of the file.
func TestWrongKind(t *testing.T) {
	for text, want := range map[string]string{
		"limits: 5":                 ":1:9: limits must be an object, got a number",
		"image: [a]":                ":1:8: image must be a string, got a list",
		"network: {enforce: maybe}": ":1:20: network.enforce must be true or false, got a string",
		"network: {allow: x}":       ":1:18: network.allow must be a list, got a string; write it as [one, another]",
		"tasks: {cleanup_ttl: 5}":   ":1:22: tasks.cleanup_ttl must be a duration like 90s, 30m, 24h or 2d, got \"5\"",
		"- a":                       ":1:1: the file must be an object, got a list",

		"image: x\nlimits: {running: ten}":           ":2:19: limits.running must be a whole number of at least 1, got \"ten\"",
		"limits:\n  running: 99999999999999999999":   ":2:12: limits.running must be a whole number of at least 1, got \"99999999999999999999\"",
		"repos:\n  o/r:\n    secrets: {A: [secret]}": ":3:18: repos.o/r.secrets.A must be a string, got a list",
	} {
		f := newFiles(t)
		f.user("config.yaml", text)
		if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.HasSuffix(err.Error(), "/config.yaml"+want) {
			t.Errorf("Load of %q: error %v, want a usage error that ends with %q", text, err, "/config.yaml"+want)
		}
	}
}

// TestAllProblemsAtOnce checks that one error reports everything that is wrong with a file,
// in the order of the lines, and does not repeat what could be a credential.
func TestAllProblemsAtOnce(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", `imag: x
pool: 9
network:
  mode: closed
  ports: [443, 0, ~]
  allow: [https://a.com/]
secrets: {A: [sentinel], A: env:X}
repos:
  o: {}
`)
	_, err := config.Load(f.paths, f.ship)
	file := filepath.Join(f.paths.Config, "config.yaml")
	want := []string{
		`1:1: the file has an unknown key "imag"; did you mean image?`,
		`2:7: pool must be 0 to 8, got "9"`,
		`4:9: network.mode must be isolated, allowlist or open, got "closed"`,
		`5:16: network.ports[1] must be 1 to 65535, got "0"`,
		`5:19: network.ports[2] is empty; add a value or remove the line`,
		`6:11: network.allow[0] is refused: `,
		`7:14: secrets.A must be a string, got a list`,
		`7:26: secrets has the key "A" twice; the first is on line 7`,
		`9:3: repos.o must be owner/repo (on github.com), host/owner/repo or local:/absolute/path, got "o"`,
	}
	if fail.CodeOf(err) != fail.Usage {
		t.Fatalf("Load: error %v, want a usage error", err)
	}
	lines := strings.Split(err.Error(), "\n")
	if len(lines) != len(want) {
		t.Fatalf("Load: error of %d lines, want %d:\n%v", len(lines), len(want), err)
	}
	for i, line := range lines {
		if !strings.HasPrefix(line, file+":"+want[i]) || strings.Contains(line, "sentinel") {
			t.Errorf("line %d of the error = %q, want %q", i+1, line, file+":"+want[i])
		}
	}
}
