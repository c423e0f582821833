// What the API sends, as far as the pages use it. docs/api.md and /openapi.json describe it.

export interface Login { key: string; name: string; scope: "read" | "submit" | "admin"; expires_at?: string }

export interface Problem { status: number; code: string; detail: string; hint: string; errors?: string[]; title?: string; trace_id?: string }
export interface Failure { code: string; message: string; hint?: string }
export interface Usage { requests: number; tokens: number; usd: number }
export interface Use extends Usage { of: string; name?: string; unknown_price?: boolean }

export interface Session {
  id: string; name: string; repo: string; repo_key: string; label?: string; lease_left_s?: number; ending?: string[]; ended?: string; kept?: string; suspended?: boolean; restoring?: string; fork_of?: string; workspace?: string; setup?: { step: string; state: string }[]; state: string; desired: string; branch?: string; task?: string; image: string;
  profile?: string; from?: string; network_mode?: string; enforced: boolean; created_at: string; state_changed_at: string; visited_at?: string;
  error?: Failure; usage?: Usage; reachable?: boolean; base?: { branch?: string; commit?: string };
  attention?: { state: string; agent?: string; on?: string; since: string };
  resources: { cpus: number; memory: number; disk: number };
  ports?: { guest: number; host?: number; error?: string }[];
}

export interface Task {
  id: string; name: string; state: string; desired: string; agent: string; model?: string; repository: string; session?: string; in_session?: boolean;
  labels?: Record<string, string>; actor?: string; attempt?: number; artifacts?: number; created_at: string; started_at?: string; ended_at?: string;
  state_changed_at: string; host?: string; preserved_until?: string; retry_of?: string; error?: Failure; usage?: Usage;
  outcome?: { result: string; reason?: string; hint?: string; exit_code?: number };
  progress?: { turns: number; tool_calls: number; current_tool?: string; cost_usd: number; result?: string; error?: string };
}

export interface Question {
  id: string; session: string; session_name: string; repo: string; task?: string; kind: string; agent?: string; tool?: string; text: string;
  choices?: string[]; parts?: number; only?: boolean; state: string; asked_at: string; deadline?: string; answer?: string; by?: string;
}

export interface Overview { seq: number; at: string; sessions: Session[]; tasks: Task[]; questions: Question[]; cluster?: string; notes?: string[] }

export interface Event { id: string; seq: number; at: string; kind: string; data: Record<string, any> | null }

export interface Changes { base?: string; files: { path: string; from?: string; status: string; added: number; deleted: number; binary?: boolean }[]; patch: string }

export interface Screen { at: string; window?: string; screen?: string[]; agents?: { name: string; state: string; on?: string; since: string }[]; changes?: { branch?: string; commits: number; files: number; insertions: number; deletions: number }; machine?: { disk_total: number; disk_used: number; load: number; mem_total: number; mem_used: number } }

export interface Denial { name?: string; addr?: string; port?: number; request?: string; reason: string; count: number; first: string; last: string }
export interface Decision { seq: number; time: string; kind: string; allowed: boolean; name?: string; addr?: string; port?: number; proto?: string; request?: string; rule?: string; source?: string; reason?: string; count?: number; end?: boolean; bytes_in?: number; bytes_out?: number }
export interface Rule { pattern: string; ports?: number[]; source?: string }
export interface Network { enforced: boolean; gateway_error?: string; policy: { mode: string; names: Rule[] | null; denied?: Rule[]; asked?: Rule[] }; gateway?: { stats: { allowed: number; denied: number; bytes_in: number; bytes_out: number; open: number } } }

export interface Recording { id: string; subject: string; title: string; name: string; began: string; ended: string; width: number; height: number; size: number; parts: number }

export interface Window { id: string; index: number; name: string; active: boolean; command: string }
export interface Artifact { name: string; size: number; sha256: string }

export interface Images {
  images: { name: string; key: string; arch: string; source: string; size: number; ready: boolean; created_at?: string; warm?: { size: number }[] }[];
  making: { name: string; doing: string; since: string }[]; failures?: { at: string; error: string }[]; pool: { vm: string; image: string; created_at: string }[];
}

export interface ClusterHost {
  name: string; state: string; role: string; version?: string; arch?: string; accel?: string; slots: number; free_slots: number; free_memory: number; free_disk: number;
  images?: string[]; labels?: Record<string, string>; heartbeat?: string; joined_at: string; removed_at?: string;
}
export interface ClusterHosts { cluster: string; host: string; hosts: ClusterHost[] }
