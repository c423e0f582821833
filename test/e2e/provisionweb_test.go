//go:build e2e

package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/test/realvm"
)

// Hosts of the provision web that the shipped allowlist contains by a wildcard.
const (
	packagesName = "stand-in.debian.org" // cloudimage.sh writes it into the image
	registryName = "stand-in.npmjs.org"
)

// provisionWeb serves everything that provisioning a cloud image fetches: packages,
// nvm, Node, an npm registry and a release of lazygit. Node and npm are real; they
// come from the Debian guest image. The agents and lazygit only print their version.
// It also serves the image itself.
type provisionWeb struct {
	*forge
	versions []byte // versions.env for this web
}

// newProvisionWeb starts the servers and points the resolver at them until the end
// of the test. With the same dir, everything that the key of a golden image depends on
// is the same each time.
func newProvisionWeb(t *testing.T, b *box, dir string) *provisionWeb {
	t.Helper()
	names := []string{"github.com", "nodejs.org", packagesName, registryName, imagesName}
	useForgeAddr(t, names...)
	ca := keptAuthority(t, filepath.Join(dir, "ca.pem"))
	w := &provisionWeb{forge: newForgeOf(t, ca, filepath.Join(b.Home, "forge"), random(), names...)}
	var err error
	if w.versions, err = sessionizer.Provision.ReadFile("provision/versions.env"); err != nil {
		t.Fatal(err)
	}
	lazygit := packExecutables(t, "lazygit", fmt.Sprintf("#!/bin/sh\necho 'version=%s,'\n", w.readVersion("LAZYGIT_VERSION")))
	sum := sha256.Sum256(lazygit)
	w.versions = fmt.Appendf(w.versions, "NVM_COMMIT=%s\nLAZYGIT_SHA256_X86_64=%x\nLAZYGIT_SHA256_ARM64=%x\nAGENT_BROWSER=0 # 250 MB\n", w.createNVM(b), sum, sum)

	w.http.Handle(packagesName+"/pool/", http.FileServer(http.Dir(realvm.CloudImage())))
	w.http.HandleFunc("github.com/nvm-sh/", w.git)
	w.http.HandleFunc("github.com/jesseduffield/", func(r http.ResponseWriter, _ *http.Request) { _, _ = r.Write(lazygit) })
	w.http.HandleFunc(registryName+"/", w.serveRegistry)
	node := w.packNode(b, dir)
	w.http.HandleFunc("nodejs.org/dist/", func(r http.ResponseWriter, q *http.Request) { http.ServeFile(r, q, node) })
	return w
}

// readVersion returns a setting of versions.env.
func (w *provisionWeb) readVersion(name string) string {
	m := regexp.MustCompile(`(?m)^` + name + `=(\S+)$`).FindSubmatch(w.versions)
	if m == nil {
		w.t.Fatalf("%s in versions.env = none, want a version", name)
	}
	return string(m[1])
}

// renderTemplate returns the lines of the VM template that a guest needs for this web,
// as behind a company's proxy: the CA and the URL of the npm registry.
func (w *provisionWeb) renderTemplate() string {
	ca := strings.ReplaceAll(strings.TrimSpace(string(w.ca)), "\n", "\n    ")
	return "caCerts:\n  certs:\n  - |\n    " + ca + `
provision:
- mode: data
  path: /root/.npmrc
  content: |
    registry=https://` + registryName + `/
    cafile=/etc/ssl/certs/ca-certificates.crt

`
}

// createNVM creates a repository with the nvm of testdata and returns its commit.
func (w *provisionWeb) createNVM(b *box) string {
	text, err := os.ReadFile("testdata/cloudimage/nvm.sh")
	if err != nil {
		w.t.Fatal(err)
	}
	b.Write("nvm/nvm.sh", string(text))
	r := b.Run("sh", "-ec", `export GIT_AUTHOR_DATE='2026-01-01T00:00:00Z' GIT_COMMITTER_DATE='2026-01-01T00:00:00Z'
		git init -q nvm && cd nvm && git add . && git commit -qm nvm && git tag "$1" && mkdir -p ../forge/nvm-sh &&
		git clone -q --bare . ../forge/nvm-sh/nvm.git && git rev-parse HEAD`, "sh", w.readVersion("NVM_VERSION"))
	if r.Code != 0 {
		w.t.Fatalf("repository of nvm: exit %d\n%s\nwant exit 0", r.Code, r.All())
	}
	return strings.TrimSpace(r.Stdout)
}

// packNode packs the Debian guest's Node like a release of Node, unless dir has that
// archive, and returns its path.
func (w *provisionWeb) packNode(b *box, dir string) string {
	image := realvm.Image(w.t)
	packed := filepath.Join(dir, "node-"+filepath.Base(filepath.Dir(image.Location))+".tar.gz")
	if _, err := os.Stat(packed); err == nil {
		return packed
	}
	r := b.Run("sh", "-ec", `PATH=$PATH:/usr/sbin
		qemu-img convert -O raw "$1" raw && mkdir -p node/lib/node_modules
		debugfs -R "rdump /usr/local/lib/node_modules/npm node/lib/node_modules" raw 2>&1
		debugfs -R "rdump /usr/local/lib/node_modules/node-linux-$2/bin node" raw 2>&1
		rm raw
		ln -s ../lib/node_modules/npm/bin/npm-cli.js node/bin/npm && ln -s ../lib/node_modules/npm/bin/npx-cli.js node/bin/npx
		tar --owner=0 --group=0 -c node | gzip -1 >node.tar.gz
		test -x node/bin/node && test -s node/bin/npm
		mv node.tar.gz "$3"`,
		"sh", image.Location, map[string]string{"x86_64": "x64", "aarch64": "arm64"}[image.Arch], packed)
	if r.Code != 0 {
		w.t.Fatalf("archive of node: exit %d\n%s\nwant exit 0", r.Code, r.All())
	}
	return packed
}

// serveRegistry answers as the npm registry, which has the agents and the CLI of dev containers only.
func (w *provisionWeb) serveRegistry(r http.ResponseWriter, q *http.Request) {
	for name, is := range map[string]struct{ program, version, suffix string }{
		"@anthropic-ai/claude-code": {"claude", w.readVersion("CLAUDE_CODE_VERSION"), "(Claude Code)"},
		"@openai/codex":             {"codex", w.readVersion("CODEX_VERSION"), "codex-cli"},
		"@devcontainers/cli":        {"devcontainer", w.readVersion("DEVCONTAINERS_VERSION"), ""},
	} {
		manifest := map[string]any{"name": name, "version": is.version, "bin": map[string]string{is.program: "run"}}
		text, err := json.Marshal(manifest)
		if err != nil {
			w.t.Error(err)
		}
		packed := packExecutables(w.t, "package/package.json", string(text), "package/run", "#!/bin/sh\necho '"+is.version+" "+is.suffix+"'\n")
		switch q.URL.Path {
		case "/" + name + "/-/" + is.program + ".tgz":
			_, _ = r.Write(packed)
			return
		case "/" + name:
			sum := sha512.Sum512(packed)
			manifest["dist"] = map[string]string{
				"tarball":   "https://" + registryName + "/" + name + "/-/" + is.program + ".tgz",
				"integrity": "sha512-" + base64.StdEncoding.EncodeToString(sum[:]),
			}
			_ = json.NewEncoder(r).Encode(map[string]any{
				"name": name, "dist-tags": map[string]string{"latest": is.version}, "versions": map[string]any{is.version: manifest},
			})
			return
		}
	}
	http.NotFound(r, q)
}

// packExecutables packs files, given as name and text, into a tar.gz. The same files
// give the same archive.
func packExecutables(t *testing.T, files ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	a := tar.NewWriter(z)
	for i := 0; i < len(files); i += 2 {
		if err := a.WriteHeader(&tar.Header{Name: files[i], Mode: 0o755, Size: int64(len(files[i+1]))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(a, files[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// buildWith builds the program with another versions.env and returns its path.
func buildWith(t *testing.T, dir string, versions []byte) string {
	t.Helper()
	shipped, err := filepath.Abs("../../provision/versions.env")
	if err != nil {
		t.Fatal(err)
	}
	ours := filepath.Join(dir, "versions.env")
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{shipped: ours}})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{ours: versions, filepath.Join(dir, "overlay.json"): overlay} {
		if err := os.WriteFile(name, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	program := filepath.Join(dir, "bin", "agent-sessionizer")
	// The same flags as for the program of the other tests, for the build cache.
	cmd := exec.CommandContext(t.Context(), "go", "build", "-overlay", filepath.Join(dir, "overlay.json"), "-o", program, "../../cmd/agent-sessionizer")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the program: %v\n%s", err, out)
	}
	return program
}
