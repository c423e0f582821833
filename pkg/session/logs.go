package session

import "path/filepath"

// Log is one of a session's logs on this host. The guest can write to some of them.
type Log struct {
	Name  string
	About string
	Paths []string // the file is at the first of them that exists
}

// Logs returns where a session's logs are. Any of them may be missing.
func (m *Manager) Logs(s Session) []Log {
	vm := filepath.Join(m.Config.Paths.LimaHome, s.VM())
	return []Log{
		{"keeper", "the session's keeper", []string{m.Config.Paths.KeeperLog(s.ID)}},
		{SetupScript, "output of the repository's setup", []string{m.SetupLog(s.ID, SetupScript)}},
		{SetupDevcontainer, "output of the dev container's start", []string{m.SetupLog(s.ID, SetupDevcontainer)}},
		{SetupServices, "output of the services' start", []string{m.SetupLog(s.ID, SetupServices)}},
		{"gateway", "the session's gateway", []string{filepath.Join(m.Config.Paths.Gateway(s.ID), "gateway.log")}},
		{"serial", "the VM's console", []string{filepath.Join(vm, "serial.log"), filepath.Join(vm, "serialp.log"), filepath.Join(vm, "serialv.log")}},
		{"hostagent", "Lima's host agent", []string{filepath.Join(vm, "ha.stderr.log")}},
	}
}
