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

	"github.com/agent-sessionizer/agent-sessionizer"
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
		t.Errorf("groups: %s", got)
	}
	header, _, _ := strings.Cut(string(f.ship["network-allowlist.txt"].Data), "\n\n")
	for name, rules := range c.Groups() {
		if len(rules) == 0 || !strings.Contains(header, name) {
			t.Errorf("group %s: %v", name, rules)
		}
	}
	s := settings(t, c, "github.com/o/r", "")
	if c.Image != "ubuntu" || c.Limits != (config.Limits{Running: 10, MemoryReserve: 1 << 30, DiskReserve: 5 << 30, SavedHome: 256 << 20, MirrorSize: 20 << 30, MirrorRefs: 50_000, MirrorTime: 2 * time.Hour}) ||
		s.Resources != (config.Resources{CPUs: 4, Memory: 8 << 30, Disk: 50 << 30}) || len(s.Secrets) != 0 {
		t.Error(c.Image, c.Limits, s)
	}
	p := compiled(t, c, s, nil, nil)
	if p.Mode != policy.Allowlist || !slices.Equal(p.Ports, []uint16{80, 443, 22}) || !strings.Contains(patterns(p), "api.anthropic.com") {
		t.Error(p.Mode, p.Ports, patterns(p))
	}
	if !p.Enforced {
		t.Error("by default the network is not enforced")
	}
}

func TestLaterLayersWin(t *testing.T) {
	f := newFiles(t)
	check := func(layer, image string, running int, reserve config.Size, cpus int, mode config.Mode) {
		t.Helper()
		c := f.load()
		s := settings(t, c, "github.com/o/r", "")
		if c.Image != image || c.Limits.Running != running || c.Limits.MemoryReserve != reserve || s.Resources.CPUs != cpus || s.Network.Mode != mode {
			t.Errorf("%s: %v %v %v %v", layer, c.Image, c.Limits, s.Resources, s.Network.Mode)
		}
		if c.Limits.DiskReserve != 5<<30 || s.Resources.Memory != 8<<30 {
			t.Errorf("%s: what no file names has changed: %v %v", layer, c.Limits, s.Resources)
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
		t.Error(got)
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
				t.Error(err)
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
		{"not YAML", conf, "image: [x\n", 1, ""},
		{"a list for a map", conf, "network: [a]\n", 1, "mapping"},
		{"a map for a text", conf, "\nimage: {a: b}\n", 2, ""},
		{"text for a number", conf, "limits:\n  running: many\n", 2, ""},
		{"second document", conf, "image: x\n---\nimage: y\n", 3, "second"},
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
		{"port without quotes in braces", conf, "network: {allow: [a.com:22]}\n", 1, "in quotes"},
		{"not a group's name", conf, "network:\n  allow: ['@a/b']\n", 2, "@github"},
		{"unknown group", conf, "network:\n  allow: ['@nothing']\n", 0, "network.allow: group \"@nothing\" does not exist; the groups are @git"},
		{"unknown group of a profile", conf, "profiles:\n  p: {network: {deny: ['@nothing']}}\n", 0, "profiles.p.network.deny"},
		{"unknown group of a repository", conf, "repos:\n  o/r: {network: {allow: ['@nothing']}}\n", 0, "repos.github.com/o/r.network.allow"},
		{"allowlist with an unknown group", names, "@git\n@nothing\n", 2, "the groups are @git"},
		{"group of groups", "network-groups/mine.txt", "a.org\n@git\n", 2, "write names"},
		{"bad name in a group", "network-groups/mine.txt", "10.0.0.1\n", 1, "IP address"},
		{"bad size", conf, "limits:\n  disk_reserve: a lot\n", 2, "8GiB"},
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
				t.Fatal(err)
			}
			file := filepath.Join(f.paths.Config, c.file)
			at := file + ":"
			if c.line > 0 {
				at = fmt.Sprintf("%s:%d", file, c.line)
			}
			if c.line >= 0 && (!strings.Contains(err.Error(), at) || fail.HintOf(err) != "agent-sessionizer config edit "+c.file) {
				t.Errorf("no %s or hint in: %v (%s)", at, err, fail.HintOf(err))
			}
			if !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v", err)
			}
			if strings.Count(err.Error(), "\n") > 1 {
				t.Errorf("long: %v", err)
			}
		})
	}
}

func TestEmptyFilesSayNothing(t *testing.T) {
	for _, text := range []string{"", "\n\n", "# a comment\n", "---\n", "network:\nsecrets:\n", "\ufeffimage: ubuntu\n"} {
		f := newFiles(t)
		f.user("config.yaml", text)
		c, err := config.Load(f.paths, f.ship)
		if err != nil || c.Image != "ubuntu" || settings(t, c, "github.com/o/r", "").Network.Mode != "allowlist" {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestUnreadableFile(t *testing.T) {
	f := newFiles(t)
	if err := os.MkdirAll(filepath.Join(f.paths.Config, "config.yaml"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "config.yaml") {
		t.Fatal(err)
	}
	f = newFiles(t)
	f.user("config.yaml", strings.Repeat("# much\n", 1<<18))
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "larger than 1MiB") {
		t.Fatal(err)
	}
}

func TestAllowlistIsReplaced(t *testing.T) {
	f := newFiles(t)
	names := func() string {
		c := f.load()
		return patterns(compiled(t, c, settings(t, c, "github.com/o/r", ""), []policy.Rule{{Pattern: "extra.org"}}, nil))
	}
	if got := names(); got != "github.com *.npmjs.org extra.org" {
		t.Error(got)
	}
	f.user("config.yaml", "network: {allow: [More.Example.ORG]}\n")
	if got := names(); got != "github.com *.npmjs.org more.example.org extra.org" {
		t.Error(got)
	}
	f.system("network-allowlist.txt", "system.org\n")
	if got := names(); got != "system.org more.example.org extra.org" {
		t.Error(got)
	}
	f.user("network-allowlist.txt", "# nothing\n")
	if got := names(); got != "more.example.org extra.org" {
		t.Error(got)
	}
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
network: {allow: ['B.org:22', '@git', '@git', 'b.org:9418'], deny: ['*.github.com:80', x.org]}
repos:
  o/r: {network: {deny: [y.org]}}
`)
	c := f.load()
	p := compiled(t, c, settings(t, c, "github.com/o/r", ""), nil, nil)
	if got, want := rules(p.Names), "a.org:443,8443 network-allowlist.txt:1; *.golang.org network-allowlist.txt:2 (@go); b.org:22 network.allow; "+
		"github.com:22,443 network.allow (@git); *.github.com network.allow (@git); b.org:9418 network.allow"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if got := rules(p.Denied); got != "*.github.com:80 network.deny; x.org network.deny; y.org network.deny" {
		t.Error(got)
	}

	// A user's group replaces the shipped one, and changes the stamp.
	stamp := c.Stamp()
	f.user("network-groups/git.txt", "mine.org\n")
	f.user("network-groups/.git.txt.swp", "\x00")
	f.user("network-groups/git.txt~", "\x00")
	if c.Stamp() == stamp {
		t.Error("a new group changes nothing")
	}
	stamp = c.Stamp()
	c = f.load()
	p = compiled(t, c, settings(t, c, "", ""), nil, nil)
	if got := rules(p.Names); !strings.Contains(got, "mine.org network.allow (@git); b.org:9418") {
		t.Error(got)
	}
	if file := filepath.Join(f.paths.Config, "network-groups", "git.txt"); !slices.Contains(c.Files, file) {
		t.Errorf("%s is not among %v", file, c.Files)
	}
	f.user("network-groups/git.txt", "mine.org\nother.org\n")
	if c.Stamp() == stamp {
		t.Error("a changed group changes nothing")
	}
	f.user("network-groups/Bad Name.txt", "")
	if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.Contains(err.Error(), "Bad Name.txt") {
		t.Error(err)
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
			t.Errorf("%q: %v %v, want %v", repo, s.Network.Enforced(), p.Enforced, want)
		}
	}
}

func TestHostServices(t *testing.T) {
	for text, want := range map[string]string{
		"localhost:5432": "127.0.0.1:5432", "LOCALHOST:5432": "127.0.0.1:5432", "127.0.0.1:3000": "127.0.0.1:3000",
		"192.168.5.2:8080": "192.168.5.2:8080", "[::ffff:10.0.0.1]:22": "10.0.0.1:22", "[::1]:80": "[::1]:80",
	} {
		if got, err := config.ParseHostService(text); err != nil || got.String() != want {
			t.Errorf("%s is %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "localhost", "localhost:0", "localhost:x", "db.lan:5432", "5432", ":5432", "0.0.0.0:1", "[::]:1", "224.0.0.1:1", "[fe80::1%eth0]:1", "127.0.0.1:65536"} {
		if got, err := config.ParseHostService(text); err == nil || !strings.Contains(err.Error(), "ADDRESS:PORT") {
			t.Errorf("%s is %v, %v", text, got, err)
		}
	}
	f := newFiles(t)
	f.user("config.yaml", "network: {host_services: ['localhost:5432']}\n")
	c := f.load()
	p, err := c.Policy(settings(t, c, "", ""), config.Additions{HostServices: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:3000")}}, nil)
	if err != nil || fmt.Sprint(p.HostServices) != "[127.0.0.1:5432 127.0.0.1:3000]" {
		t.Error(p, err)
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
	if s.Profile != "small" || s.Resources != (config.Resources{CPUs: 4, Memory: 1 << 30, Disk: 50 << 30}) ||
		fmt.Sprint(s.Secrets) != "map[A:env:SYS_A B:env:MY_B C:env:SMALL_C]" || fmt.Sprint(s.Network.Allow) != "[system.org small.org]" {
		t.Error(s)
	}
	s = settings(t, c, "github.com/acme/app", "") // resources.yaml < profile < repository, in upper or lower case
	if s.Profile != "Big" || s.Resources != (config.Resources{CPUs: 9, Memory: 3 << 30, Disk: 60 << 30}) ||
		fmt.Sprint(s.Secrets) != "map[A:env:APP_A B:env:MY_B]" || s.Network.Mode != "open" {
		t.Error(s)
	}
	if p := compiled(t, c, s, nil, nil); p.Mode != policy.Open || len(p.Ports) != 0 {
		t.Error("an empty list of ports is none:", p.Ports)
	}
	if s = settings(t, c, "github.com/acme/app", "theirs"); s.Profile != "theirs" || s.Resources.CPUs != 7 { // selected by flag
		t.Error(s)
	}
	if s = settings(t, c, "github.com/acme/theirs", ""); s.Profile != "theirs" {
		t.Error(s)
	}
	if s = settings(t, c, "github.com/acme/mono", ""); s.Resources.Disk != 100<<30 || s.Resources.CPUs != 4 {
		t.Error(s)
	}
	if settings(t, c, "github.com/o/r", "").Secrets["C"] != "env:SMALL_C" || settings(t, c, "github.com/acme/app", "").Secrets["C"] != "" {
		t.Error("settings of one session are seen by another")
	}

	_, err := c.For("github.com/o/r", "Small")
	if fail.CodeOf(err) != fail.Usage || fail.HintOf(err) == "" || !strings.Contains(err.Error(), "Big, small, theirs") {
		t.Error(err)
	}
	f.user("resources.yaml", "overrides:\n  o/r: {cpus: -2}\n")
	if _, err := f.load().For("github.com/o/r", ""); fail.CodeOf(err) != fail.Usage {
		t.Error(err)
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
		if got := settings(t, c, key, "").Secrets["T"]; got != want {
			t.Errorf("%s gets %q, want %q", key, got, want)
		}
	}
}

// TestWrongKind checks that a value of the wrong type is reported in the terms of the file.
func TestWrongKind(t *testing.T) {
	for text, want := range map[string]string{
		"image: x\nlimits: {running: ten}":         ":2: limits.running must be a number",
		"limits:\n  running: 99999999999999999999": ":2: limits.running must be a smaller number",
		"limits: 5":                 ":1: limits must be a mapping (key: value)",
		"image: [a]":                ":1: image must be a string",
		"network: {enforce: maybe}": ":1: network.enforce must be true or false",
		"network: {allow: x}":       ":1: network.allow must be a list",
		"tasks: {cleanup_ttl: 5}":   ":1: tasks.cleanup_ttl must be a duration like 360h",
		"repos:\n  o/r:\n    secrets: {A: [secret]}": ":3: repos.o/r.secrets.A must be a string",
		"- a": ":1: the file must be a mapping (key: value)",
	} {
		f := newFiles(t)
		f.user("config.yaml", text)
		if _, err := config.Load(f.paths, f.ship); fail.CodeOf(err) != fail.Usage || !strings.HasSuffix(err.Error(), "/config.yaml"+want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
